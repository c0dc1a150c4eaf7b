-- Creates the shards of a batch whose input is valid. A batch that is ending gets none: its task is released, so that
-- it is finalized (`claim.lua`).
-- KEYS: batch, work, holders. ARGV: task, fence, number of lines, of positions in a shard, model or '', JSON of base
-- models with their numbers of lines.
-- Returns 1, or 0 if the lease is lost.

local job, work, holders = unpack(KEYS)
local total, size = tonumber(ARGV[3]), tonumber(ARGV[4])
local now = clock()
if not holds(holders, ARGV[1], ARGV[2]) then
  return 0
end
if is_ending(job, now) then
  turn_to('validate', work, holders)
  return 1
end
redis.call('HSET', job, 'status', 'in_progress', 'in_progress_at', seconds(now), 'total', total, 'shard_size', size,
  'index_fence', ARGV[2], 'model_lines', ARGV[6])
if ARGV[5] ~= '' then
  redis.call('HSET', job, 'model', ARGV[5])
end
redis.call('DEL', work, holders)
for shard = 0, math.ceil(total / size) - 1 do
  redis.call('ZADD', work, 0, string.format('%06d', shard))
end
return 1
