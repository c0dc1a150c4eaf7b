-- Keeps a reservation's slots, and takes them again where they expired while its gateway could not say that it lives.
-- What its request has used so far is counted, so that no more than what came since is lost with a gateway.
-- KEYS: lease, leases of tenant, key, adapter, the day's usage. ARGV: lease id, milliseconds of its slots, of its
-- receipt, then as settle.lua has it of usage.
-- Returns {1 renewed | 0 settled or forgotten, milliseconds at which the slots expire}.

local time = redis.call('TIME')
local expiry = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[2]))
if redis.call('EXISTS', KEYS[1]) == 0 then
  return { 0, expiry }
end
local lease = redis.call('HMGET', KEYS[1], 'counted', 'batch_line')
count(KEYS[5], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], lease[1] or '')
redis.call('HSET', KEYS[1], 'counted', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
for i = 2, 4 do
  redis.call('ZADD', KEYS[i], lease[2] and '-' .. expiry or expiry, ARGV[1])
  redis.call('PEXPIRE', KEYS[i], ARGV[3])
end
return { 1, expiry }
