-- Prepended to the scripts that count: the arithmetic of gateway/core/budget.py on what is kept in Redis.
-- A bucket is a hash {requests, tokens: in use, today: tokens of the day, as of at: microseconds; epoch: when what was
-- in use was last forgotten; refused: day, and how often that day each limit did not fit; last: which did not fit the
-- request that was refused last, and when}; an absent one is unused.
-- Beside it lies a sorted set of the leases that run in its scope, by when their slots expire in milliseconds.

local MINUTE = 60000000
local DAY = 86400000000
local SLACK = 1e-6
local KEPT_MS = 172800000
local STEP_MS = 60000
local NAMES = { 'requests_per_minute', 'tokens_per_minute', 'concurrent_requests', 'tokens_per_day' }

-- Needed wherever Lua itself would make a text of a number, with 14 digits; as an argument of a command it keeps all.
local function exact(number)
  return string.format('%.17g', number)
end

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function day_of(now)
  return math.floor(now / DAY)
end

-- Limits are JSON; those of one key or adapter stand before those its tenant gives each.
local function limits_of(own, each)
  local limits = cjson.decode(own or each or '{}')
  local shadow = {}
  for _, name in ipairs(limits.shadow or {}) do
    shadow[name] = true
  end
  limits.shadow = shadow
  limits.away = limits.when_redis_is_away or {}
  return limits
end

local function meter(limits, i, used)
  local name = NAMES[i]
  local shadow = limits.shadow[name]
  return { limit = limits[name], used = used, shadow = shadow, away = not shadow and limits.away[name] or nil }
end

local function draining(limits, i, used, elapsed)
  local found = meter(limits, i, 0)
  if found.limit then
    found.used = math.max(0, (tonumber(used) or 0) - elapsed * found.limit / MINUTE)
  end
  return found
end

-- The clock has been set back, as when a replica whose clock is behind takes over. What is in use drains from now on,
-- also if nothing fits; until the clock was where it had been, nothing would. Slots end when they would have ended: of a
-- gateway that died at the same time, they would be held for as much longer. If the clock is behind by little, they are
-- left alone, because some may have been renewed since.
local function set_back(key, running, at, now)
  redis.call('HSET', key, 'at', now)
  local behind = math.floor((at - now) / 1000)
  local slots = behind > STEP_MS and redis.call('ZRANGEBYSCORE', running, exact(at / 1000), '+inf', 'WITHSCORES') or {}
  for i = 1, #slots, 2 do
    redis.call('ZADD', running, exact(slots[i + 1] - behind), slots[i])
  end
end

local function load(key, running, name, limits, now)
  local state = redis.call('HMGET', key, 'requests', 'tokens', 'at', 'today', 'epoch', 'refused')
  local at = tonumber(state[3]) or now
  if at > now then
    set_back(key, running, at, now)
    at = now
  end
  local elapsed = now - at
  local today = day_of(at) == day_of(now) and tonumber(state[4]) or 0
  return {
    key = key, running = running, name = name, epoch = state[5] or '', refused = state[6],
    is_new = not state[3] or day_of(at) ~= day_of(now),
    draining(limits, 1, state[1], elapsed), draining(limits, 2, state[2], elapsed),
    meter(limits, 3, 0), meter(limits, 4, today),
  }
end

-- What runs is only looked up where something is decided or told; until then none does.
local function count_running(bucket, now)
  bucket[3].used = redis.call('ZCOUNT', bucket.running, '(' .. math.floor(now / 1000), '+inf')
end

-- Tenant's, key's and adapter's, from keys that alternate between buckets and their leases.
-- Returns nil when the tenant's limits are not published: after a flush, no tenant may be unlimited by accident.
local function load_all(limits_key, keys, key_id, adapter, now)
  local names = { 'tenant', 'key:' .. key_id, 'adapter:' .. adapter }
  local found = redis.call('HMGET', limits_key, names[1], names[2], names[3], 'key:*', 'adapter:*')
  if not found[1] then
    return nil
  end
  return {
    load(keys[1], keys[2], names[1], limits_of(found[1]), now),
    load(keys[3], keys[4], names[2], limits_of(found[2], found[4]), now),
    load(keys[5], keys[6], names[3], limits_of(found[3], found[5]), now),
  }
end

-- A request without tokens fits whatever is in use: it adds to no debt.
local function fits(meter, amount)
  return not meter.limit or amount == 0 or meter.used + amount <= meter.limit + SLACK
end

-- Returns the number of tokens that fit the smallest of the buckets that may refuse a request.
local function smallest(buckets)
  local least = math.huge
  for _, bucket in ipairs(buckets) do
    for i = 2, 4, 2 do
      if bucket[i].limit and not bucket[i].shadow then
        least = math.min(least, bucket[i].limit)
      end
    end
  end
  return least
end

local function charge(meter, amount)
  if meter.limit then
    meter.used = math.max(0, meter.used + amount)
  end
end

local function charge_today(bucket, amount)
  bucket[4].used = math.max(0, bucket[4].used + amount)
end

-- What is written first on a day is kept until the end of the next: long enough for the day's count, and for a limit
-- lowered soon to find use that a higher one forgets. A debt that takes longer is kept longer.
-- Once a day, leases that gateways left unsettled when they died are deleted, too: until then they only take memory.
local function keep(bucket, index, now)
  local drained_ms = 0
  for i = 1, 2 do
    if bucket[i].limit then
      drained_ms = math.max(drained_ms, bucket[i].used / bucket[i].limit * 60000)
    end
  end
  if bucket.is_new or drained_ms > DAY / 1000 then
    redis.call('PEXPIRE', bucket.key, string.format('%.0f', math.ceil(math.max(drained_ms, KEPT_MS))))
  end
  if bucket.is_new then
    redis.call('SADD', index, bucket.name)
    redis.call('PEXPIRE', index, KEPT_MS)
    redis.call('ZREMRANGEBYSCORE', bucket.running, '-inf', math.floor(now / 1000))
  end
end

local function save(bucket, index, now)
  redis.call('HSET', bucket.key, 'requests', bucket[1].used, 'tokens', bucket[2].used,
    'today', bucket[4].used, 'at', now)
  keep(bucket, index, now)
end

local function refusals(bucket, now)
  local counts, day = {}, exact(day_of(now))
  for number in string.gmatch(bucket.refused or '', '%d+') do
    counts[#counts + 1] = number
  end
  return counts[1] == day and counts or { day, 0, 0, 0, 0 }
end

-- misses: of the four limits, '1' where the request did not fit. One that is refused is remembered as the last.
local function count_misses(bucket, misses, refused, index, now)
  local counts = refusals(bucket, now)
  for i = 1, 4 do
    counts[i + 1] = exact(counts[i + 1] + tonumber(string.sub(misses, i, i)))
  end
  redis.call('HSET', bucket.key, 'refused', table.concat(counts, ' '))
  if refused then
    redis.call('HSET', bucket.key, 'last', misses .. ' ' .. exact(now))
  end
  keep(bucket, index, now)
end

-- For a reply, as gateway/core/budget.py has them: of a number of its own Redis would cut off the fraction.
local function described(buckets, now)
  local told = {}
  for i, bucket in ipairs(buckets) do
    told[i] = { requests = bucket[1], tokens = bucket[2], running = bucket[3], today = bucket[4], at = now }
  end
  return cmsgpack.pack(told)
end
