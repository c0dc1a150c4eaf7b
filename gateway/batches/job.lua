-- Prepended to every script: what scripts about one batch have in common. Times of leases are in milliseconds, those a
-- caller sees in seconds.

local OPEN = { validating = true, in_progress = true, cancelling = true }

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function exact(number)
  return string.format('%.0f', number)
end

local function seconds(now)
  return exact(math.floor(now / 1000000))
end

local function ms(now)
  return math.floor(now / 1000)
end

-- Whether a task's last lease is that with this fence. It may have run out: nobody else has asked for the task since.
local function holds(holders, task, fence)
  local holder = redis.call('HGET', holders, task)
  return holder and string.match(holder, '^%d+') == fence
end

-- Whether no more lines are to be begun, although there may be some.
local function is_ending(job, now)
  local status, expires_at = unpack(redis.call('HMGET', job, 'status', 'expires_at'))
  return status == 'cancelling' or (OPEN[status] and now >= tonumber(expires_at) * 1000000)
end

-- Positions of a shard: from the first to before the second.
local function range_of(job, shard)
  local total, size = unpack(redis.call('HMGET', job, 'total', 'shard_size'))
  local first = tonumber(shard) * tonumber(size)
  return first, math.min(tonumber(total), first + tonumber(size))
end

-- Leaves one task, which is nobody's.
local function turn_to(task, work, holders)
  redis.call('DEL', work, holders)
  redis.call('ZADD', work, 0, task)
end

-- The batch has ended, and counts no more among those a tenant has open. outbox: of a tenant that is told of it.
local function close(job, work, holders, open, outbox, status, now)
  local id = redis.call('HGET', job, 'id')
  redis.call('HSET', job, 'status', status, status .. '_at', seconds(now))
  redis.call('SREM', open, id)
  if outbox then
    redis.call('ZADD', outbox, seconds(now), status .. ' ' .. id .. ' ' .. seconds(now))
  end
  turn_to('sweep', work, holders)
end
