-- Takes, keeps or gives up the turn of a line that engines may have died of: one of all gateways has it.
-- KEYS: turn. ARGV: token of who asks, milliseconds; 0 gives it up. Returns 1; 0: another has it.

local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return 1
