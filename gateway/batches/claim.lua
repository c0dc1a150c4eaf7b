-- Leases the first task without a lease, or with an expired one, of the first batch that has such a task.
-- KEYS: batch, work, holders and bits of each. ARGV: milliseconds of a lease, owner, kinds of tasks that are wanted,
-- JSON of base models and whether their lines are wanted, in which '' stands for models that it does not name. A task
-- that still has a holder was never released: its process may have died of it. The holder's fence is noted as a loss,
-- until that process shows that it lives (`release.lua`).
-- Returns {a word for each batch looked at: 'none', 'absent', 'over' or the task, fence, microseconds left, committed
-- bits of the task's positions, fields of the batch}, or only the words if no batch had a task.

local lease_ms, owner, wanted = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local wanted_models = cjson.decode(ARGV[4])
local now = clock()

local function kind_of(task)
  return string.match(task, '^%d') and 'shard' or task
end

-- Settles with which status a batch will end, when its `finalize` task is first claimed: a window that ends later does
-- not change it.
local function settle_outcome(job)
  local found = redis.call('HMGET', job, 'outcome', 'status', 'total', 'completed', 'failed')
  if found[1] then
    return
  end
  local total = tonumber(found[3]) or 0
  local done = (tonumber(found[4]) or 0) + (tonumber(found[5]) or 0)
  local outcome = total > 0 and done == total and 'completed' or 'expired'
  if found[2] == 'cancelling' then
    redis.call('HSET', job, 'outcome', 'cancelled')
  else
    redis.call('HSET', job, 'outcome', outcome, 'status', 'finalizing', 'finalizing_at', seconds(now))
  end
end

-- Returns whether a task is leased. A task that was released and rests for a while is not.
local function is_worked_on(work, holders)
  for _, task in ipairs(redis.call('ZRANGEBYSCORE', work, '(' .. ms(now), '+inf')) do
    if redis.call('HEXISTS', holders, task) == 1 then
      return true
    end
  end
  return false
end

local function is_wanted(model)
  local found = wanted_models[model]
  if found == nil then
    found = wanted_models['']
  end
  return found ~= false
end

-- Returns the ranges of positions, each from the first to before the second, whose lines are of wanted models, and
-- whether these are all lines. Lines of a batch without a record of models are of an unnamed model.
local function wanted_ranges(job)
  local record, total = unpack(redis.call('HMGET', job, 'model_lines', 'total'))
  local models = cjson.decode(record or '[]')
  if #models == 0 then
    models = { { '', tonumber(total) } }
  end
  local ranges, first, are_all = {}, 0, true
  for _, entry in ipairs(models) do
    local model, lines = unpack(entry)
    if is_wanted(model) then
      ranges[#ranges + 1] = { first, first + lines }
    else
      are_all = false
    end
    first = first + lines
  end
  return ranges, are_all
end

local function has_open(bits, first, last)
  for position = first, last - 1 do
    if redis.call('GETBIT', bits, position) == 0 then
      return true
    end
  end
  return false
end

-- Returns a due shard without open positions, whose process ended before it could release it.
local function finished_shard(job, work, bits)
  for _, task in ipairs(redis.call('ZRANGEBYSCORE', work, '(0', ms(now))) do
    if not has_open(bits, range_of(job, task)) then
      return task
    end
  end
end

-- Returns the first due shard with an open position in one of the ranges.
local function shard_within(job, work, bits, ranges)
  local size = tonumber(redis.call('HGET', job, 'shard_size'))
  for _, task in ipairs(#ranges > 0 and redis.call('ZRANGEBYSCORE', work, '-inf', ms(now)) or {}) do
    local first = tonumber(task) * size
    for _, range in ipairs(ranges) do
      if has_open(bits, math.max(first, range[1]), math.min(first + size, range[2])) then
        return task
      end
    end
  end
end

-- Returns the first task that a process may lease now. A batch that is ending is finalized once no process works on its
-- lines: until its lease expires, a process may still commit answers.
local function next_task(job, work, holders, bits)
  if is_ending(job, now) then
    return not is_worked_on(work, holders) and 'finalize' or nil
  end
  local task = redis.call('ZRANGEBYSCORE', work, '-inf', ms(now), 'LIMIT', 0, 1)[1]
  if task and kind_of(task) == 'shard' then
    local ranges, are_all = wanted_ranges(job)
    return are_all and task or finished_shard(job, work, bits) or shard_within(job, work, bits, ranges)
  end
  return task
end

local function bits_of(job, bits, task)
  if kind_of(task) == 'shard' then
    local first, last = range_of(job, task)
    return redis.call('GETRANGE', bits, first / 8, math.floor((last - 1) / 8))
  end
  return task == 'finalize' and redis.call('GET', bits) or ''
end

local words = {}
for i = 1, #KEYS, 4 do
  local job, work, holders, bits = unpack(KEYS, i, i + 3)
  local word = 'none'
  if redis.call('EXISTS', job) == 0 then
    word = 'absent'
  elseif redis.call('EXISTS', work) == 0 then
    word = 'over'
  else
    local task = next_task(job, work, holders, bits)
    if task and string.find(wanted, kind_of(task), 1, true) then
      local holder = redis.call('HGET', holders, task)
      if task == 'finalize' then
        turn_to('finalize', work, holders)
        settle_outcome(job)
      end
      local found = redis.call('HMGET', job, 'fence', 'expires_at')
      local fence = exact(math.max((tonumber(found[1]) or 0) + 1, now))
      redis.call('HSET', job, 'fence', fence)
      if holder then
        add_word(job, 'lost:' .. task, string.match(holder, '^%d+'))
      end
      redis.call('HSET', holders, task, fence .. ' ' .. owner)
      redis.call('ZADD', work, exact(ms(now) + lease_ms), task)
      words[#words + 1] = task
      local left = exact(tonumber(found[2]) * 1000000 - now)
      return { words, fence, left, bits_of(job, bits, task), redis.call('HGETALL', job) }
    end
  end
  words[#words + 1] = word
end
return { words }
