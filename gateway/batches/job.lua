-- Functions that all scripts of batches share; this file is prepended to each of them. Times of leases are in
-- milliseconds, times that clients see in seconds.

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

-- Returns whether a task's last lease is the one with this fence. The lease may have expired, as long as no other
-- process has claimed the task since.
local function holds(holders, task, fence)
  local holder = redis.call('HGET', holders, task)
  return holder and string.match(holder, '^%d+') == fence
end

-- Returns the words of a field of a batch. No word occurs twice, and a field without words does not exist.
local function words_of(job, field)
  local words = {}
  for word in string.gmatch(redis.call('HGET', job, field) or '', '%S+') do
    words[#words + 1] = word
  end
  return words
end

local function drop_word(job, field, dropped)
  local kept = {}
  for _, word in ipairs(words_of(job, field)) do
    if word ~= dropped then
      kept[#kept + 1] = word
    end
  end
  if #kept > 0 then
    redis.call('HSET', job, field, table.concat(kept, ' '))
  else
    redis.call('HDEL', job, field)
  end
  return kept
end

-- Adds a word to a field unless it is there already. Returns the number of words in the field.
local function add_word(job, field, word)
  local words = drop_word(job, field, word)
  words[#words + 1] = word
  redis.call('HSET', job, field, table.concat(words, ' '))
  return #words
end

-- Returns whether a batch that has not ended is cancelled or its window is over, so that no more of its lines begin.
local function is_ending(job, now)
  local status, expires_at = unpack(redis.call('HMGET', job, 'status', 'expires_at'))
  return status == 'cancelling' or (OPEN[status] and now >= tonumber(expires_at) * 1000000)
end

-- Returns the positions of a shard: its first one, and the one after its last.
local function range_of(job, shard)
  local total, size = unpack(redis.call('HMGET', job, 'total', 'shard_size'))
  local first = tonumber(shard) * tonumber(size)
  return first, math.min(tonumber(total), first + tonumber(size))
end

-- Replaces all tasks of a batch, and their leases, by one task that no process holds.
local function turn_to(task, work, holders)
  redis.call('DEL', work, holders)
  redis.call('ZADD', work, 0, task)
end

-- Ends a batch: it no longer counts as one of its tenant's open batches, and only its `sweep` task remains. `outbox` is
-- the key of the tenant's webhook events, if the tenant is notified of the end.
local function close(job, work, holders, open, outbox, status, now)
  local id = redis.call('HGET', job, 'id')
  redis.call('HSET', job, 'status', status, status .. '_at', seconds(now))
  redis.call('SREM', open, id)
  if outbox then
    redis.call('ZADD', outbox, seconds(now), status .. ' ' .. id .. ' ' .. seconds(now))
  end
  turn_to('sweep', work, holders)
end
