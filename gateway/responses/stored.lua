-- The stored responses of one tenant. Each call does one operation, as one.
-- KEYS: the key of a response without its id (':' and the id follow), ends {id by the time when it expires}, charges
-- {id: bytes} with the sum under 'total'. Times are milliseconds of this server's clock.
-- ARGV: the operation and its arguments.
-- A response is a hash: state, head, input, output, ending, previous, parts; if it runs in the background, also
-- background, lease and, for its output, answer_parts; if it is streamed there, also events_from, the number of the
-- first event that is kept. The events are a list under the id and ':events', which has its own end and charge.

local RESPONSES, ENDS, CHARGES = unpack(KEYS)
local CHARGED = { 'head', 'input', 'output', 'ending' }
local OVERHEAD = 512
local EVENT_OVERHEAD = 16
local REAPED = 1000

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function whole(number)
  return string.format('%d', number)
end

local function key_of(id)
  return RESPONSES .. ':' .. id
end

local function log_of(id)
  return id .. ':events'
end

local function total()
  return tonumber(redis.call('HGET', CHARGES, 'total') or 0)
end

-- Returns whether a response may have so many bytes, beside the others.
local function fits(id, bytes, most)
  local before = redis.call('HGET', CHARGES, id) or 0
  return total() - before + OVERHEAD + bytes <= tonumber(most)
end

local function refund(id)
  local bytes = redis.call('HGET', CHARGES, id)
  if bytes then
    redis.call('HDEL', CHARGES, id)
    redis.call('HINCRBY', CHARGES, 'total', whole(-bytes))
  end
  redis.call('ZREM', ENDS, id)
end

-- Refunds what has expired. Redis deletes the responses themselves.
local function reap()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', ENDS, '-inf', now, 'LIMIT', 0, REAPED)) do
    redis.call('DEL', key_of(id))
    refund(id)
  end
end

local function charge(id)
  local bytes = OVERHEAD
  for _, field in ipairs(CHARGED) do
    bytes = bytes + redis.call('HSTRLEN', key_of(id), field)
  end
  local before = redis.call('HGET', CHARGES, id) or 0
  redis.call('HSET', CHARGES, id, whole(bytes))
  redis.call('HINCRBY', CHARGES, 'total', whole(bytes - before))
end

local function write(id, keep, ...)
  local ends = whole(now + keep)
  redis.call('HSET', key_of(id), ...)
  redis.call('PEXPIREAT', key_of(id), ends)
  redis.call('ZADD', ENDS, ends, id)
  charge(id)
  local last = whole(redis.call('ZREVRANGE', ENDS, 0, 0, 'WITHSCORES')[2])
  redis.call('PEXPIREAT', ENDS, last)
  redis.call('PEXPIREAT', CHARGES, last)
end

-- Keeps the events of a response for so long from now, at most as long as the response.
local function extend_log(id, keep)
  local log, ends = log_of(id), whole(math.min(now + keep, redis.call('ZSCORE', ENDS, id)))
  redis.call('ZADD', ENDS, ends, log)
  redis.call('PEXPIREAT', key_of(log), ends)
end

-- Drops the oldest events of a response until so many bytes more fit, or none are left. Returns whether they fit.
local function make_room(id, bytes, most_events, most_bytes)
  local log, freed, dropped = log_of(id), 0, 0
  local own, all = tonumber(redis.call('HGET', CHARGES, log) or 0), total()
  local function fitting()
    return own - freed + bytes <= tonumber(most_events) and all - freed + bytes <= tonumber(most_bytes)
  end
  while not fitting() do
    local event = redis.call('LPOP', key_of(log))
    if not event then
      break
    end
    freed, dropped = freed + #event + EVENT_OVERHEAD, dropped + 1
  end
  if dropped > 0 then
    redis.call('HINCRBY', key_of(id), 'events_from', dropped)
    redis.call('HINCRBY', CHARGES, log, whole(-freed))
    redis.call('HINCRBY', CHARGES, 'total', whole(-freed))
  end
  return fitting()
end

-- Appends events, of which the first has the number `start`, except those that are there. If they do not fit, they are
-- dropped. Where Redis has lost events before them, as it may in a failover, the older ones are dropped, so that those
-- that are kept have consecutive numbers.
local function append(id, most_events, most_bytes, start, events)
  local log, new, bytes = log_of(id), {}, 0
  local next = redis.call('HGET', key_of(id), 'events_from') + redis.call('LLEN', key_of(log))
  if tonumber(start) > next then
    redis.call('DEL', key_of(log))
    refund(log)
    redis.call('HSET', key_of(id), 'events_from', start)
    next = tonumber(start)
  end
  for index = math.max(1, next - start + 1), #events do
    new[#new + 1] = events[index]
    bytes = bytes + #events[index] + EVENT_OVERHEAD
  end
  if #new == 0 then
    return
  elseif make_room(id, bytes, most_events, most_bytes) then
    redis.call('RPUSH', key_of(log), unpack(new))
    redis.call('HINCRBY', CHARGES, log, whole(bytes))
    redis.call('HINCRBY', CHARGES, 'total', whole(bytes))
  else
    redis.call('HINCRBY', key_of(id), 'events_from', #new)
  end
end

local function is_running(state)
  return state == 'queued' or state == 'in_progress'
end

local function finish(id, state, ...)
  redis.call('HSET', key_of(id), 'state', state, ...)
  redis.call('HDEL', key_of(id), 'lease')
  charge(id)
end

-- Returns the state of a response, or nothing if there is none. One whose lease has run out fails, with this ending.
local function state_of(id, lost)
  local state, lease = unpack(redis.call('HMGET', key_of(id), 'state', 'lease'))
  if state and is_running(state) and tonumber(lease) <= now then
    finish(id, 'failed', 'ending', lost)
    return 'failed'
  end
  return state or nil
end

local function read(id)
  return redis.call('HMGET', key_of(id), 'state', 'head', 'ending', 'output')
end

local operations = {}

-- Returns whether there is room for so many bytes more, and the items of the responses that end with `previous`: input
-- and output in turn, the newest first. In place of the items it returns what hinders: a word, and the id concerned.
function operations.history(bytes, most_bytes, previous, most_parts, most_history)
  reap()
  local room = (bytes == '' or fits('', bytes, most_bytes)) and 1 or 0
  local items, parts, read_bytes, id = {}, 0, 0, previous
  while id ~= '' do
    local state, before, count, more, input, output =
      unpack(redis.call('HMGET', key_of(id), 'state', 'previous', 'parts', 'answer_parts', 'input', 'output'))
    if not state then
      return { room, {}, 'absent', id }
    elseif state ~= 'ended' then
      return { room, {}, state, id }
    end
    parts, read_bytes = parts + count + (more or 0), read_bytes + #input + #output
    if parts > tonumber(most_parts) or read_bytes > tonumber(most_history) then
      return { room, {}, 'long', id }
    end
    items[#items + 1] = input
    items[#items + 1] = output
    id = before
  end
  return { room, items, '', '' }
end

-- Returns one list of items for each pair of an id and 'input' or 'output', or nothing in its place if there is no such
-- response. Returns 0 if the lists have more than so many bytes together.
function operations.items(most, ...)
  local asked, found, read_bytes = { ... }, {}, 0
  for index = 1, #asked, 2 do
    local items = redis.call('HGET', key_of(asked[index]), asked[index + 1])
    read_bytes = read_bytes + #(items or '')
    if read_bytes > tonumber(most) then
      return 0
    end
    found[#found + 1] = items
  end
  return found
end

-- Stores a response that has ended. Returns 1; 0: no room.
function operations.keep(id, keep, bytes, most_bytes, ...)
  reap()
  if not fits(id, bytes, most_bytes) then
    return 0
  end
  write(id, keep, 'state', 'ended', ...)
  return 1
end

-- Stores a background response that has not begun; its events, if it is streamed, are kept for so long. Returns 1; 0: no
-- room.
function operations.create(id, keep, bytes, most_bytes, lease, streams, keep_events, ...)
  reap()
  if not fits(id, bytes, most_bytes) then
    return 0
  end
  write(id, keep, 'state', 'queued', 'lease', whole(now + lease), ...)
  if streams == '1' then
    redis.call('HSET', key_of(id), 'events_from', 0)
    extend_log(id, keep_events)
  end
  return 1
end

-- Renews the lease of a background response, sets its state and, if it is streamed, appends its next events. Returns 1;
-- 0: it has ended or was deleted.
function operations.renew(id, lease, state, keep_events, most_events, most_bytes, start, ...)
  local known, streams = unpack(redis.call('HMGET', key_of(id), 'state', 'events_from'))
  if not known or not is_running(known) then
    return 0
  end
  redis.call('HSET', key_of(id), 'state', state, 'lease', whole(now + lease))
  if streams then
    append(id, most_events, most_bytes, start, { ... })
    extend_log(id, keep_events)
  end
  return 1
end

-- Ends a background response. Returns 1; 0: it has ended or was deleted; -1: no room for so many bytes more.
function operations.finish(id, bytes, most_bytes, state, ...)
  reap()
  local known = redis.call('HGET', key_of(id), 'state')
  if not known or not is_running(known) then
    return 0
  elseif not make_room(id, bytes, math.huge, most_bytes) then
    return -1
  end
  finish(id, state, ...)
  return 1
end

function operations.read(id, lost)
  return state_of(id, lost) and read(id)
end

-- Returns the number that the next event will have, at most so many events from the number `start` on and, if the
-- response has ended and no events follow, its fields. Returns nothing if there is no response; 0: its events are not
-- kept; -1: the event `start` was dropped.
function operations.events(id, lost, start, most)
  local state = state_of(id, lost)
  if not state then
    return nil
  end
  local log, from = log_of(id), redis.call('HGET', key_of(id), 'events_from')
  if not from or tonumber(redis.call('ZSCORE', ENDS, log) or 0) <= now then
    return 0
  elseif tonumber(start) < tonumber(from) then
    return -1
  end
  local first = start - from
  local found = redis.call('LRANGE', key_of(log), whole(first), whole(first + most - 1))
  local length = redis.call('LLEN', key_of(log))
  local ended = not is_running(state) and first + #found >= length
  return { from + length, found, ended and read(id) or {} }
end

function operations.input(id)
  return redis.call('HGET', key_of(id), 'input')
end

-- Cancels a background response that runs. Returns it; nothing if there is none; 0 if it does not run in
-- the background.
function operations.cancel(id, lost, ending)
  local state = state_of(id, lost)
  if not state then
    return nil
  elseif redis.call('HGET', key_of(id), 'background') ~= '1' then
    return 0
  elseif is_running(state) then
    finish(id, 'cancelled', 'ending', ending)
  end
  return read(id)
end

function operations.remove(id)
  reap()
  local removed = redis.call('DEL', key_of(id))
  redis.call('DEL', key_of(log_of(id)))
  refund(id)
  refund(log_of(id))
  return removed
end

function operations.use()
  reap()
  return total()
end

return operations[ARGV[1]](unpack(ARGV, 2))
