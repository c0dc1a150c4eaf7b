-- Extends a lease. KEYS: batch, work, holders. ARGV: task, fence, milliseconds. Returns its standing.

local job, work, holders = unpack(KEYS)
local task, fence = ARGV[1], ARGV[2]
local now = clock()
if not holds(holders, task, fence) then
  return 'lost'
end
if task ~= 'finalize' and is_ending(job, now) then
  return 'ending'
end
redis.call('ZADD', work, exact(ms(now) + tonumber(ARGV[3])), task)
return 'yours'
