-- Marks a line or a task as begun on trial, before it is begun, or takes the mark back when its process outlived it.
-- KEYS: batch, holders. ARGV: task, fence, the line's position or the task again, 1 or -1.
-- Returns its marks; -1: the lease is lost, and nothing is marked. A process that lost its lease and lives may still
-- take its mark back.

local job, holders = unpack(KEYS)
if ARGV[4] == '1' and not holds(holders, ARGV[1], ARGV[2]) then
  return -1
end
local field = 'mark:' .. ARGV[3]
local marks = redis.call('HINCRBY', job, field, ARGV[4])
if marks <= 0 then
  redis.call('HDEL', job, field)
end
return marks
