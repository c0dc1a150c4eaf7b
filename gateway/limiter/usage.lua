-- What is in use in some scopes of one tenant. Scopes of which nothing is known any more leave the index.
-- KEYS: limits, index, then bucket and leases of each scope. ARGV: for each scope its name and that of what stands in
-- where it has no limits of its own, '' for none.
-- Returns {buckets as described, for each limit how often it did not fit a request today, for each scope its last
-- refusal: '1' for each limit that did not fit, and when in microseconds; '' for none}.

local now = clock()
local buckets, refused, last = {}, {}, {}
for i = 1, #ARGV, 2 do
  local name, each = ARGV[i], ARGV[i + 1]
  local found = redis.call('HMGET', KEYS[1], name, each)
  local bucket = load(KEYS[i + 2], KEYS[i + 3], name, limits_of(found[1], found[2]), now)
  count_running(bucket, now)
  local counts = refusals(bucket, now)
  for j = 2, 5 do
    refused[#refused + 1] = tonumber(counts[j])
  end
  if bucket[3].used == 0 and redis.call('EXISTS', bucket.key) == 0 then
    redis.call('SREM', KEYS[2], name)
  end
  buckets[#buckets + 1] = bucket
  last[#last + 1] = redis.call('HGET', bucket.key, 'last') or ''
end
return { described(buckets, now), refused, last }
