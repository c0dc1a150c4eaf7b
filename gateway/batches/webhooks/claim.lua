-- Leases events that are due for a while. If the process that has them dies, another one gets them when the lease ends.
-- ARGV: seconds they are kept, how many at most. Returns now, how many wait in all, and the events.

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])
for _, event in ipairs(due) do
  redis.call('ZADD', KEYS[1], 'XX', now + tonumber(ARGV[1]), event)
end
return { string.format('%.6f', now), redis.call('ZCARD', KEYS[1]), due }
