-- Answers to positions of a shard count from now on: all of them or none.
-- KEYS: batch, holders, bits, parts. ARGV: task, fence, number of parts, those, number of positions, those, then names
-- of counts, each followed by what is added.
-- Returns 1; 0: the lease is lost; -1: a position is done, or is none of the shard; in both nothing has happened.
-- Repeating it does no harm: who asks again, having lost the lease since, hears of a part that counts, and keeps it.

local job, holders, bits, parts = unpack(KEYS)
local task, num_parts = ARGV[1], tonumber(ARGV[3])
local first_position = 5 + num_parts
local first_count = first_position + tonumber(ARGV[first_position - 1])
if redis.call('SISMEMBER', parts, ARGV[4]) == 1 then
  return 1
end
if not holds(holders, task, ARGV[2]) then
  return 0
end
local first, last = range_of(job, task)
for i = first_position, first_count - 1 do
  local position = tonumber(ARGV[i])
  if position < first or position >= last or redis.call('SETBIT', bits, position, 1) == 1 then
    for undone = first_position, i - 1 do
      redis.call('SETBIT', bits, ARGV[undone], 0)
    end
    return -1
  end
end
redis.call('SADD', parts, unpack(ARGV, 4, 3 + num_parts))
for i = first_count, #ARGV, 2 do
  redis.call('HINCRBY', job, ARGV[i], ARGV[i + 1])
end
return 1
