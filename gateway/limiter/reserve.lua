-- Charges one request and ARGV[1] tokens to the tenant and to the key, or to neither.
-- KEYS: lease, tenant limits, tenant bucket, key limits, key bucket, void. ARGV: tokens, lease milliseconds.
-- Returns {1 admitted | 0 refused | -1 limits not published, now, then for tenant and key: request limit, requests in
-- use, token limit, tokens in use}, numbers as text, an absent limit as ''. Repeating a reservation charges it once; one
-- that its caller has given up already is not charged.

local now = clock()
local tokens = tonumber(ARGV[1])
local buckets = load_both(KEYS[2], KEYS[3], KEYS[4], KEYS[5], now)
if not buckets then
  return { -1, exact(now) }
end

local admitted = redis.call('EXISTS', KEYS[1], KEYS[6]) > 0
if not admitted then
  admitted = true
  for _, bucket in ipairs(buckets) do
    admitted = admitted and fits(bucket.requests, 1) and fits(bucket.tokens, tokens)
  end
  if admitted then
    -- The lease remembers what was counted: a limit that appears later must not refund what nobody charged.
    local lease = { 'tokens', ARGV[1] }
    for scope, bucket in ipairs(buckets) do
      charge(bucket.requests, 1)
      charge(bucket.tokens, tokens)
      save(bucket, now)
      lease[#lease + 1] = 'requests' .. scope
      lease[#lease + 1] = bucket.requests.limit and 1 or 0
      lease[#lease + 1] = 'tokens' .. scope
      lease[#lease + 1] = bucket.tokens.limit and 1 or 0
    end
    redis.call('HSET', KEYS[1], unpack(lease))
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
end

local reply = { admitted and 1 or 0, exact(now) }
for _, bucket in ipairs(buckets) do
  for _, meter in ipairs({ bucket.requests, bucket.tokens }) do
    reply[#reply + 1] = meter.limit and exact(meter.limit) or ''
    reply[#reply + 1] = exact(meter.used)
  end
end
return reply
