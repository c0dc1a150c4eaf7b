-- Prepended to every script: the arithmetic of gateway/core/budget.py on buckets kept in hashes.
-- A bucket is a hash {requests, tokens: in use, as of at: microseconds}; an absent one is unused. One without limits is
-- neither read nor written.

local MINUTE = 60000000
local SLACK = 1e-6
local IDLE_MS = 3600000

local function exact(number)
  return string.format('%.17g', number)
end

local function clock()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function meter(limit, used, elapsed)
  limit = tonumber(limit)
  if not limit then
    return { used = 0 }
  end
  return { limit = limit, used = math.max(0, (tonumber(used) or 0) - elapsed * limit / MINUTE) }
end

local function load(key, limits, now)
  if not (limits[1] or limits[2]) then
    return { key = key, requests = { used = 0 }, tokens = { used = 0 } }
  end
  local state = redis.call('HMGET', key, 'requests', 'tokens', 'at')
  local elapsed = math.max(0, now - (tonumber(state[3]) or now))
  return { key = key, requests = meter(limits[1], state[1], elapsed), tokens = meter(limits[2], state[2], elapsed) }
end

-- A key's own limits, where somebody set them, stand before those its tenant gives every key.
-- Returns nil when the tenant's limits are not published: after a flush, nobody may be unlimited by accident.
local function load_both(tenant_limits, tenant_bucket, key_limits, key_bucket, now)
  local tenant = redis.call('HMGET', tenant_limits, 'requests_per_minute', 'tokens_per_minute',
    'key_requests_per_minute', 'key_tokens_per_minute', 'source')
  if not tenant[5] then
    return nil
  end
  local key = redis.call('HMGET', key_limits, 'requests_per_minute', 'tokens_per_minute', 'source')
  if not key[3] then
    key = { tenant[3], tenant[4] }
  end
  return { load(tenant_bucket, tenant, now), load(key_bucket, key, now) }
end

local function fits(meter, amount)
  return not meter.limit or meter.used + amount <= meter.limit + SLACK
end

local function charge(meter, amount)
  if meter.limit then
    meter.used = math.max(0, meter.used + amount)
  end
end

local function drain_ms(meter)
  return meter.limit and meter.used / meter.limit * 60000 or 0
end

local function save(bucket, now)
  if not (bucket.requests.limit or bucket.tokens.limit) then
    return
  end
  redis.call('HSET', bucket.key, 'requests', exact(bucket.requests.used), 'tokens', exact(bucket.tokens.used),
    'at', exact(now))
  local idle = math.max(IDLE_MS, drain_ms(bucket.requests), drain_ms(bucket.tokens))
  redis.call('PEXPIRE', bucket.key, string.format('%.0f', math.ceil(idle)))
end
