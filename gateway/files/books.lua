-- What a tenant keeps, and what it is charged for that. Each call does one operation, as one.
-- KEYS: records {id: JSON}, order {id by when it was begun}, expiry {id by its end}, use {bytes, files},
-- held {token: bytes}, leases {token by its end}, pins {id: JSON {holder: its end}}, gone {id by when its file ended}.
-- The order keeps the ids of the last MOST_GONE files that ended, so that a list can go on behind one of them.
-- A token is an upload under way, whose record will carry it, or the id of a batch whose answers are in storage. Times are milliseconds of this server's clock.
-- ARGV: the operation and its arguments.

local RECORDS, ORDER, EXPIRY, USE, HELD, LEASES, PINS, GONE = unpack(KEYS)
local REAPED = 1000
local MOST_GONE = 1000

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function charge(bytes, files)
  redis.call('HINCRBY', USE, 'bytes', string.format('%d', bytes))
  redis.call('HINCRBY', USE, 'files', files)
end

local function used(what)
  return tonumber(redis.call('HGET', USE, what) or 0)
end

local function end_lease(token)
  redis.call('HDEL', HELD, token)
  redis.call('ZREM', LEASES, token)
end

local function give_back(token)
  local bytes = redis.call('HGET', HELD, token)
  if bytes then
    end_lease(token)
    charge(-bytes, -1)
  end
end

local function is_pinned(id)
  for _, ends in pairs(cjson.decode(redis.call('HGET', PINS, id) or '{}')) do
    if ends > now then
      return true
    end
  end
  return false
end

local function is_live(id)
  local ends = redis.call('ZSCORE', EXPIRY, id)
  return not ends or tonumber(ends) > now or is_pinned(id)
end

local function forget(id)
  local record = redis.call('HGET', RECORDS, id)
  charge(-cjson.decode(record).bytes, -1)
  redis.call('HDEL', RECORDS, id)
  redis.call('HDEL', PINS, id)
  redis.call('ZREM', EXPIRY, id)
  redis.call('ZADD', GONE, now, id)
  if redis.call('ZCARD', GONE) > MOST_GONE then
    redis.call('ZREM', ORDER, redis.call('ZPOPMIN', GONE)[1])
  end
  return record
end

-- Ends what has expired. Returns the records of files that no tenant keeps any more.
local function reap()
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', LEASES, '-inf', now)) do
    give_back(token)
  end
  local gone = {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', EXPIRY, '-inf', now, 'LIMIT', 0, REAPED)) do
    if not is_pinned(id) then
      gone[#gone + 1] = forget(id)
    end
  end
  return gone
end

local operations = {}

-- Begins an upload of so many bytes or more. Returns 1; 0: no room for them; -1: no room for a file; and when it began.
function operations.reserve(token, bytes, lease, most_bytes, most_files)
  reap()
  if used('files') + 1 > tonumber(most_files) then
    return { -1, now }
  elseif used('bytes') + bytes > tonumber(most_bytes) then
    return { 0, now }
  end
  charge(bytes, 1)
  redis.call('HSET', HELD, token, bytes)
  redis.call('ZADD', LEASES, now + lease, token)
  return { 1, now }
end

-- Charges an upload for `bytes` in all, and keeps it for longer. Returns 1; 0: no room; -1: it has run out.
function operations.hold(token, bytes, lease, most_bytes)
  reap()
  local held = redis.call('HGET', HELD, token)
  if not held then
    return -1
  end
  local more = bytes - held
  if more > 0 and used('bytes') + more > tonumber(most_bytes) then
    return 0
  end
  charge(more, 0)
  redis.call('HSET', HELD, token, bytes)
  redis.call('ZADD', LEASES, now + lease, token)
  return 1
end

-- Charges for `more` bytes of answers of a batch (less if negative), whatever the tenant may have. It counts as a file
-- until nothing is left of it.
function operations.grow(token, more, lease)
  reap()
  local held = redis.call('HGET', HELD, token)
  local bytes = (held or 0) + more
  if bytes <= 0 then
    return give_back(token)
  end
  charge(more, held and 0 or 1)
  redis.call('HSET', HELD, token, string.format('%d', bytes))
  redis.call('ZADD', LEASES, now + lease, token)
end

function operations.drop(token)
  give_back(token)
end

-- Makes a file of an upload. Returns its record, or the record that already has this id; nothing if the upload has expired.
function operations.keep(token, id, record, began, ends)
  reap()
  local first = redis.call('HGET', RECORDS, id)
  local held = redis.call('HGET', HELD, token)
  if first then
    give_back(token)
    return first
  elseif not held then
    return nil
  end
  end_lease(token)
  charge(cjson.decode(record).bytes - held, 0)
  redis.call('HSET', RECORDS, id, record)
  redis.call('ZADD', ORDER, began, id)
  redis.call('ZREM', GONE, id)
  if ends ~= '' then
    redis.call('ZADD', EXPIRY, ends, id)
  end
  return record
end

-- Ids, also of files that have ended, from behind `after` on, or from the beginning. Returns nothing if `after` is none.
function operations.ids(after, newest_first)
  local newest = newest_first == '1'
  local from = 0
  if after ~= '' then
    local rank = redis.call(newest and 'ZREVRANK' or 'ZRANK', ORDER, after)
    if not rank then
      return nil
    end
    from = rank + 1
  end
  return redis.call(newest and 'ZREVRANGE' or 'ZRANGE', ORDER, from, -1)
end

-- Records of those that are there.
function operations.read(...)
  local found = {}
  for _, id in ipairs({ ... }) do
    local record = redis.call('HGET', RECORDS, id)
    if record and is_live(id) then
      found[#found + 1] = record
    end
  end
  return found
end

-- Returns the record; 0 if there is none; -1 if a batch needs the file.
function operations.remove(id)
  reap()
  if redis.call('HEXISTS', RECORDS, id) == 0 then
    return 0
  end
  return is_pinned(id) and -1 or forget(id)
end

-- What `remove` would return, without a write.
function operations.removable(id)
  local record = redis.call('HGET', RECORDS, id)
  return not record and 0 or is_pinned(id) and -1 or record
end

-- Keeps a file from being deleted, and from its expiry, for `term`. Returns the record, or nothing.
function operations.pin(id, holder, term)
  reap()
  local record = redis.call('HGET', RECORDS, id)
  if record then
    local holders = cjson.decode(redis.call('HGET', PINS, id) or '{}')
    holders[holder] = now + term
    redis.call('HSET', PINS, id, cjson.encode(holders))
  end
  return record
end

function operations.unpin(id, holder)
  local holders = cjson.decode(redis.call('HGET', PINS, id) or '{}')
  holders[holder] = nil
  if next(holders) then
    redis.call('HSET', PINS, id, cjson.encode(holders))
  else
    redis.call('HDEL', PINS, id)
  end
end

-- Returns the records of files that have just ended, and which of some tokens are still in use.
function operations.sweep(...)
  local gone, known = reap(), {}
  for _, token in ipairs({ ... }) do
    local record = redis.call('HGET', RECORDS, string.sub(token, 1, 29))
    local mine = record and cjson.decode(record).token == token
    if mine or redis.call('HEXISTS', HELD, token) == 1 then
      known[#known + 1] = token
    end
  end
  return { gone, known }
end

function operations.use()
  reap()
  return { used('bytes'), used('files') }
end

return operations[ARGV[1]](unpack(ARGV, 2))
