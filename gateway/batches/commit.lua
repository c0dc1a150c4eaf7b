-- Commits the answers to positions of a shard and counts their usage: all of them or none. A line that ran twice is thus
-- charged once, for the run whose answer counts. Without positions, only usage is counted, under a part's name.
-- KEYS: batch, holders, bits, parts, then as rows.lua has it. ARGV: task, fence, number of parts, their names, number of
-- positions, the positions, number of counts, their names, each followed by what to add to it, then as rows.lua has it.
-- Returns 1 if they are committed; 0 if the lease is lost, -1 if a position was committed before or is outside the
-- shard: nothing has changed then. A call can be repeated: it returns 1 if the parts were committed, although the lease
-- may have been lost since.

local job, holders, bits, parts = unpack(KEYS)
local task, num_parts = ARGV[1], tonumber(ARGV[3])
local first_position = 5 + num_parts
local first_count = first_position + tonumber(ARGV[first_position - 1]) + 1
local first_row = first_count + 2 * tonumber(ARGV[first_count - 1])
if redis.call('SISMEMBER', parts, ARGV[4]) == 1 then
  return 1
end
if not holds(holders, task, ARGV[2]) then
  return 0
end
local first, last = range_of(job, task)
for i = first_position, first_count - 2 do
  local position = tonumber(ARGV[i])
  if position < first or position >= last or redis.call('SETBIT', bits, position, 1) == 1 then
    for undone = first_position, i - 1 do
      redis.call('SETBIT', bits, ARGV[undone], 0)
    end
    return -1
  end
end
redis.call('SADD', parts, unpack(ARGV, 4, 3 + num_parts))
for i = first_count, first_row - 1, 2 do
  redis.call('HINCRBY', job, ARGV[i], ARGV[i + 1])
end
count_rows(5, first_row, clock())
return 1
