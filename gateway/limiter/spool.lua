-- Counts usage of one tenant that was kept in a gateway while Redis was away: each batch once, in order. The same tokens
-- count against the limits of their day, so that what a gateway granted by itself is not granted again.
-- KEYS: the gateway's receipt, the tenant's limits, the index of its scopes; then for each count the day's usage, and
-- the bucket and leases of its tenant, key and adapter. ARGV: number of the batch, milliseconds to remember it for, most
-- rows of a day; then for each count its row, the row of others, when its day expires, its words, its day since 1970,
-- and the ids of its key and adapter.
-- Returns 1 counted | 0 it had been already.

local ROW_KEYS, ROW_ARGS = 7, 7

if tonumber(redis.call('GET', KEYS[1]) or '0') >= tonumber(ARGV[1]) then
  return 0
end
local now = clock()
for i = 0, (#KEYS - 3) / ROW_KEYS - 1 do
  local at, first = 3 + ROW_ARGS * i, 4 + ROW_KEYS * i
  count(KEYS[first], ARGV[at + 1], ARGV[at + 2], ARGV[3], ARGV[at + 3], ARGV[at + 4], '')
  if tonumber(ARGV[at + 5]) == day_of(now) then
    local words = numbers(ARGV[at + 4])
    local scopes = { unpack(KEYS, first + 1, first + 6) }
    for _, bucket in ipairs(load_all(KEYS[2], scopes, ARGV[at + 6], ARGV[at + 7], now) or {}) do
      charge_today(bucket, (words[2] or 0) + (words[4] or 0))
      save(bucket, KEYS[3], now)
    end
  end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
