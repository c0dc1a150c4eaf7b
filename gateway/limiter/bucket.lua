-- Prepended to the scripts that count: the arithmetic of gateway/core/bucket.py on what is kept in Redis.
-- A bucket is a hash {requests, tokens: in use, today: tokens of the day, as of at: microseconds; epoch: when what was
-- in use was last forgotten; refused: day, and how often that day each limit did not fit; last: which did not fit the
-- request that was refused last, and when; wanted: as MessagePack, a minute, then requests, tokens and slots that
-- interactive requests wanted in it, those of the minute before, and the answers owed}; an absent one is unused.
-- Beside it lies a sorted set of the leases that run in its scope, by when their slots expire in milliseconds. Of lines
-- of batches it has the negative of that.

local MINUTE = 60000000
local DAY = 86400000000
local SLACK = 1e-6
local KEPT_MS = 172800000
local STEP_MS = 60000
local RECENT_MINUTES = 60
local BATCH_PART = 0.25
local PROTECTED = 0.9
local OWED_ANSWERS = 9
local MOST_OWED = 90
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
  local slots = behind > STEP_MS and redis.call('ZRANGE', running, 0, -1, 'WITHSCORES') or {}
  for i = 1, #slots, 2 do
    local expiry = tonumber(slots[i + 1])
    if math.abs(expiry) * 1000 > at then
      redis.call('ZADD', running, exact(expiry > 0 and expiry - behind or expiry + behind), slots[i])
    end
  end
end

-- What interactive requests have lately wanted, as gateway/core/demand.py has it: a minute, three amounts that were wanted
-- in it, three in the minute before, and the answers owed. MessagePack, because to read and write it as text took the
-- scripts a third longer.
local function demand_of(packed)
  return packed and cmsgpack.unpack(packed) or { -1, 0, 0, 0, 0, 0, 0, 0 }
end

local function load(key, running, name, limits, now)
  local state = redis.call('HMGET', key, 'requests', 'tokens', 'at', 'today', 'epoch', 'refused', 'wanted')
  local at = tonumber(state[3]) or now
  if at > now then
    set_back(key, running, at, now)
    at = now
  end
  local elapsed = now - at
  local today = day_of(at) == day_of(now) and tonumber(state[4]) or 0
  return {
    key = key, running = running, name = name, epoch = state[5] or '', refused = state[6],
    demand = demand_of(state[7]), minute = math.floor(now / MINUTE), batch_lines = 0,
    is_new = not state[3] or day_of(at) ~= day_of(now),
    draining(limits, 1, state[1], elapsed), draining(limits, 2, state[2], elapsed),
    meter(limits, 3, 0), meter(limits, 4, today),
  }
end

-- What runs is only looked up where something is decided or told; until then none does.
local function count_running(bucket, now)
  local ms = math.floor(now / 1000)
  bucket.batch_lines = redis.call('ZCOUNT', bucket.running, '-inf', '(-' .. ms)
  bucket[3].used = bucket.batch_lines + redis.call('ZCOUNT', bucket.running, '(' .. ms, '+inf')
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

local function wanted(bucket, i)
  local demand, age = bucket.demand, math.max(0, bucket.minute - bucket.demand[1])
  if age == 0 then
    return math.max(demand[1 + i], demand[4 + i])
  end
  return age == 1 and demand[1 + i] or 0
end

local function want(bucket, requests, tokens, running, owed)
  if requests == 0 and tokens == 0 and running == 0 then
    return
  end
  local _, r, t, s, r1, t1, s1, owed_before = unpack(bucket.demand)
  local age = math.max(0, bucket.minute - bucket.demand[1])
  if age == 1 then
    r, t, s, r1, t1, s1 = 0, 0, 0, r, t, s
  elseif age > 1 then
    r, t, s, r1, t1, s1 = 0, 0, 0, 0, 0, 0
  end
  owed = math.min(MOST_OWED, math.max(0, owed_before + owed))
  bucket.demand = { bucket.minute, r + requests, t + tokens, math.max(s, running), r1, t1, s1, owed }
  bucket.has_wanted = true
end

local function correct_demand(bucket, minute, requests, tokens)
  local first = minute == bucket.demand[1] and 2 or minute == bucket.demand[1] - 1 and 5
  if first and (requests ~= 0 or tokens ~= 0) then
    bucket.demand[first] = math.max(0, bucket.demand[first] + requests)
    bucket.demand[first + 1] = math.max(0, bucket.demand[first + 1] + tokens)
    bucket.has_wanted = true
  end
end

-- Returns whether a line of a batch leaves of the i-th limit what interactive requests have lately wanted.
local function leaves_enough(bucket, i, amount)
  local meter, minute = bucket[i], bucket.demand[1]
  if not meter.limit or amount == 0 or i == 4 or minute < 0 or bucket.minute - minute > RECENT_MINUTES then
    return true
  elseif i == 3 then
    return meter.used == 0 and bucket.demand[8] == 0
      or bucket.batch_lines + amount + math.max(meter.used - bucket.batch_lines, wanted(bucket, i)) <= meter.limit
  end
  local left = wanted(bucket, i)
  return meter.used + amount <= math.max(0, meter.limit - left) * BATCH_PART + SLACK
    or meter.used <= SLACK and amount + left * PROTECTED <= meter.limit
end

-- A request without tokens fits whatever is in use: it adds to no debt.
local function fits(bucket, i, amount, is_batch_line)
  local meter = bucket[i]
  if meter.limit and amount ~= 0 and meter.used + amount > meter.limit + SLACK then
    return false
  end
  return not is_batch_line or leaves_enough(bucket, i, amount)
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

local function demand_fields(bucket)
  return bucket.has_wanted and { 'wanted', cmsgpack.pack(bucket.demand) } or {}
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
    redis.call('ZREMRANGEBYSCORE', bucket.running, -math.floor(now / 1000), math.floor(now / 1000))
  end
end

local function save(bucket, index, now)
  redis.call('HSET', bucket.key, 'requests', bucket[1].used, 'tokens', bucket[2].used,
    'today', bucket[4].used, 'at', now, unpack(demand_fields(bucket)))
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
  redis.call('HSET', bucket.key, 'refused', table.concat(counts, ' '), unpack(demand_fields(bucket)))
  if refused then
    redis.call('HSET', bucket.key, 'last', misses .. ' ' .. exact(now))
  end
  keep(bucket, index, now)
end

-- For a reply, as gateway/core/bucket.py has them: of a number of its own Redis would cut off the fraction.
local function described(buckets, now)
  local told = {}
  for i, bucket in ipairs(buckets) do
    told[i] = {
      requests = bucket[1], tokens = bucket[2], running = bucket[3], today = bucket[4], at = now,
      batch_lines = bucket.batch_lines, demand = bucket.demand[1] >= 0 and bucket.demand or nil,
    }
  end
  return cmsgpack.pack(told)
end
