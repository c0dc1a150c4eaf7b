-- Keeps a reservation's slots, and takes them again where they expired while its gateway could not say that it lives.
-- KEYS: lease, then leases of tenant, key, adapter. ARGV: lease id, milliseconds of its slots, of its receipt.
-- Returns {1 renewed | 0 settled or forgotten, milliseconds at which the slots expire}.

local time = redis.call('TIME')
local expiry = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2]))
if redis.call('EXISTS', KEYS[1]) == 0 then
  return { 0, expiry }
end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
for i = 2, 4 do
  redis.call('ZADD', KEYS[i], expiry, ARGV[1])
  redis.call('PEXPIRE', KEYS[i], ARGV[3])
end
return { 1, expiry }
