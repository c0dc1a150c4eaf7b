-- Corrects a reservation to what was used, once: whoever comes second finds no lease.
-- KEYS: lease, tenant limits, tenant bucket, key limits, key bucket, void.
-- ARGV: tokens used, requests used (0 or 1), 1 if the reservation may still be on its way and must then charge nothing.
-- Returns {1 settled | 0 nothing to settle, now}.

local VOID_MS = 600000

local now = clock()
local lease = redis.call('HMGET', KEYS[1], 'tokens', 'requests1', 'tokens1', 'requests2', 'tokens2')
if not lease[1] then
  if ARGV[3] == '1' then
    redis.call('SET', KEYS[6], '1', 'PX', VOID_MS)
  end
  return { 0, exact(now) }
end
redis.call('DEL', KEYS[1])

local tokens = tonumber(ARGV[1]) - tonumber(lease[1])
local requests = tonumber(ARGV[2]) - 1
local buckets = load_both(KEYS[2], KEYS[3], KEYS[4], KEYS[5], now) or {}
for scope, bucket in ipairs(buckets) do
  if lease[2 * scope] == '1' then
    charge(bucket.requests, requests)
  end
  if lease[2 * scope + 1] == '1' then
    charge(bucket.tokens, tokens)
  end
  save(bucket, now)
end
return { 1, exact(now) }
