-- Releases a task. A shard whose positions are all committed is removed, and after the last shard the batch is
-- finalized. A process that releases a lease which it has lost shows that it lives, so its loss and its marks are
-- removed.
-- KEYS: batch, work, holders, bits. ARGV: task, fence, milliseconds until the task may be leased again.
-- Returns 1, or 0 if the lease was lost.

local job, work, holders, bits = unpack(KEYS)
local task, fence = ARGV[1], ARGV[2]
drop_word(job, 'lost:' .. task, fence)
for _, field in ipairs(redis.call('HKEYS', job)) do
  if string.match(field, '^mark:') then
    drop_word(job, field, fence)
  end
end
if not holds(holders, task, fence) then
  return 0
end
redis.call('HDEL', holders, task)
if string.match(task, '^%d') then
  local first, last = range_of(job, task)
  if redis.call('BITCOUNT', bits, first / 8, math.floor((last - 1) / 8)) == last - first then
    redis.call('ZREM', work, task)
    redis.call('HDEL', job, 'lost:' .. task)
    if redis.call('EXISTS', work) == 0 then
      turn_to('finalize', work, holders)
    end
    return 1
  end
end
local wait = tonumber(ARGV[3])
redis.call('ZADD', work, wait > 0 and exact(ms(clock()) + wait) or 0, task)
return 1
