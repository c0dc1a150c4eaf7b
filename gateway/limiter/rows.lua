-- Prepended, after bucket.lua and counted.lua, to the scripts that count usage which was not counted when its request
-- was settled.

local ROW_KEYS, ROW_ARGS = 7, 7

-- Counts rows of one tenant's usage. The tokens of today's rows count against the limits of the day, too.
-- The last KEYS, from `first_key` on: the tenant's limits, the index of its scopes; then for each row the day's usage,
-- and the bucket and leases of its tenant, key and adapter. The last ARGV, from `first_arg` on: most rows of a day; then
-- for each row its name, the row of others, when its day expires, its words, its day since 1970, and the ids of its key
-- and adapter.
local function count_rows(first_key, first_arg, now)
  local limits_key, index, max_rows = KEYS[first_key], KEYS[first_key + 1], ARGV[first_arg]
  for i = 0, (#KEYS - first_key - 1) / ROW_KEYS - 1 do
    local at, first = first_arg + ROW_ARGS * i, first_key + 2 + ROW_KEYS * i
    count(KEYS[first], ARGV[at + 1], ARGV[at + 2], max_rows, ARGV[at + 3], ARGV[at + 4], '')
    if tonumber(ARGV[at + 5]) == day_of(now) then
      local words = numbers(ARGV[at + 4])
      local scopes = { unpack(KEYS, first + 1, first + 6) }
      for _, bucket in ipairs(load_all(limits_key, scopes, ARGV[at + 6], ARGV[at + 7], now) or {}) do
        charge_today(bucket, (words[2] or 0) + (words[4] or 0))
        save(bucket, index, now)
      end
    end
  end
end
