-- Charges one request and ARGV[2] tokens to the tenant, the key and the adapter, or to none of them.
-- KEYS: lease, void, limits, index, then bucket and leases of tenant, key, adapter.
-- ARGV: lease id, tokens, milliseconds of its slot, of its receipt, key id, adapter, and where the tokens are a guess
-- that yields to the smallest bucket, what it does not yield below, else ''; how many buckets, from the first on, have
-- counted the request already, so that their requests per minute neither count nor refuse it; '1' for a line of a batch,
-- which leaves what interactive requests have lately wanted. A lease id of '' only asks: nothing is charged, and only a
-- refusal is counted.
-- Returns {1 admitted | 0 refused | -1 limits not published, misses: for each limit of each scope '1' where the request
-- did not fit, the buckets as described, tokens}. Repeating a reservation charges it once; one that its caller has given
-- up already is not charged.

local lease_key, void_key, limits_key, index = unpack(KEYS, 1, 4)
local lease_id, slot_ms, receipt_ms, key_id, adapter = ARGV[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local tokens, num_counted, is_batch_line = tonumber(ARGV[2]), tonumber(ARGV[8]), ARGV[9] == '1'
local now = clock()
local buckets = load_all(limits_key, { unpack(KEYS, 5) }, key_id, adapter, now)
if not buckets then
  return { -1 }
end
for _, bucket in ipairs(buckets) do
  count_running(bucket, now)
end
if redis.call('EXISTS', lease_key, void_key) > 0 then
  return { 1, '000000000000', described(buckets, now), tokens }
end
if ARGV[7] ~= '' then
  tokens = math.max(tonumber(ARGV[7]), math.min(tokens, smallest(buckets)))
end
local amounts = { 1, tokens, 1, tokens }

local admitted, misses = true, {}
for scope, bucket in ipairs(buckets) do
  local missed = ''
  for i = 1, 4 do
    local fit = (scope <= num_counted and i == 1) or fits(bucket, i, amounts[i], is_batch_line)
    admitted = admitted and (fit or bucket[i].shadow)
    missed = missed .. (fit and '0' or '1')
  end
  misses[scope] = missed
end

local only_asks = lease_id == ''
if admitted and not only_asks then
  -- The lease remembers what was counted: a limit that appears later must not refund what was never charged.
  local lease = { 'tokens', tokens, 'day', day_of(now), is_batch_line and 'batch_line' or 'minute', buckets[1].minute }
  local expiry = math.floor(now / 1000) + tonumber(slot_ms)
  for scope, bucket in ipairs(buckets) do
    local counted, used = '', { 0, 0 }
    for i = 1, 2 do
      local counts = bucket[i].limit and string.sub(misses[scope], i, i) == '0' and (i == 2 or scope > num_counted)
      used[i] = counts and amounts[i] or 0
      charge(bucket[i], used[i])
      counted = counted .. (counts and '1' or '0')
    end
    charge_today(bucket, tokens)
    bucket[3].used = bucket[3].used + 1
    if is_batch_line then
      bucket.batch_lines = bucket.batch_lines + 1
    else
      want(bucket, used[1], used[2], bucket[3].limit and bucket[3].used - bucket.batch_lines or 0, -1)
    end
    redis.call('ZADD', bucket.running, is_batch_line and -expiry or expiry, lease_id)
    redis.call('PEXPIRE', bucket.running, receipt_ms)
    save(bucket, index, now)
    lease[#lease + 1] = 'scope' .. scope
    lease[#lease + 1] = counted .. bucket.epoch
  end
  redis.call('HSET', lease_key, unpack(lease))
  redis.call('PEXPIRE', lease_key, receipt_ms)
end
for scope, bucket in ipairs(buckets) do
  if not admitted and not is_batch_line then
    local refused = { 0, 0, 0 }
    for i = 1, 3 do
      local is_refused = string.sub(misses[scope], i, i) == '1' and not bucket[i].shadow
      if is_refused and amounts[i] <= bucket[i].limit then
        refused[i] = amounts[i] + (i == 3 and bucket[3].used - bucket.batch_lines or 0)
      end
    end
    want(bucket, refused[1], refused[2], refused[3], refused[3] > 0 and bucket.batch_lines > 0 and OWED_ANSWERS or 0)
  end
  if misses[scope] ~= '0000' and not (admitted and only_asks) then
    count_misses(bucket, misses[scope], not admitted, index, now)
  end
end
return { admitted and 1 or 0, table.concat(misses), described(buckets, now), tokens }
