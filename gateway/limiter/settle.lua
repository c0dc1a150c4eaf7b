-- Corrects a reservation to what was used and gives back its slots, once: a second call finds no lease.
-- In the same step what it used is counted for good, but for what renewals have counted already.
-- KEYS: as reserve.lua, then the day's usage. ARGV: lease id, tokens used, requests used (0 or 1), 1 if the reservation
-- may still be on its way and must then charge nothing, key id, adapter; then of usage the row, the row of others, most
-- rows of a day, milliseconds since 1970 at which the day expires, and the counts; then tokens that count against the
-- limits of the day.
-- Returns {1 settled | 0 nothing to settle, now}.

local VOID_MS = 600000

local lease_key, void_key, limits_key, index = unpack(KEYS, 1, 4)
local now = clock()
local lease = redis.call('HMGET', lease_key, 'tokens', 'day', 'scope1', 'scope2', 'scope3', 'counted', 'minute')
if not lease[1] then
  if ARGV[4] == '1' then
    redis.call('SET', void_key, '1', 'PX', VOID_MS)
  end
  return { 0, now }
end
redis.call('DEL', lease_key)
for scope = 1, 3 do
  redis.call('ZREM', KEYS[4 + 2 * scope], ARGV[1])
end
count(KEYS[11], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], lease[6] or '')

local tokens = tonumber(ARGV[2]) - tonumber(lease[1])
local today = tonumber(ARGV[12]) - tonumber(lease[1])
local requests = tonumber(ARGV[3]) - 1
local buckets = load_all(limits_key, { unpack(KEYS, 5) }, ARGV[5], ARGV[6], now) or {}
for scope, bucket in ipairs(buckets) do
  local counted = lease[2 + scope]
  if string.sub(counted, 3) == bucket.epoch then
    local more_requests = string.sub(counted, 1, 1) == '1' and requests or 0
    local more_tokens = string.sub(counted, 2, 2) == '1' and tokens or 0
    charge(bucket[1], more_requests)
    charge(bucket[2], more_tokens)
    if lease[7] then
      correct_demand(bucket, tonumber(lease[7]), more_requests, more_tokens)
    end
    charge_today(bucket, tonumber(lease[2]) == day_of(now) and today or 0)
    save(bucket, index, now)
  end
end
return { 1, now }
