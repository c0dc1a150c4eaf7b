-- Changes one name, unless another process has changed it meanwhile.
-- KEYS: records, aliases, seeds, generation, changes.
-- ARGV: name; generation of its record as the caller knows it, '' for none; the new record, '' to remove it; drain
-- seconds or ''; seed or ''; the generation that the whole registry must still have, or ''; number of its present
-- aliases, those, then the aliases it is to have.
-- Returns {'done', generation}, {'seeded', ''}: the configuration has said this before; {'conflict', generation},
-- {'taken', who}: a name is an alias or an alias is a name.

local records, aliases, seeds, counter, changes = unpack(KEYS)
local name, expected, record, drain, seed, at = unpack(ARGV, 1, 6)
local first_wanted = 8 + tonumber(ARGV[7])

if seed ~= '' and redis.call('HGET', seeds, name) == seed then
  return { 'seeded', '' }
end
local value = redis.call('HGET', records, name)
local current = value and string.match(value, '^%d+') or ''
if current ~= expected or (at ~= '' and (redis.call('GET', counter) or '0') ~= at) then
  return { 'conflict', current }
end
local owner = redis.call('HGET', aliases, name)
if owner then
  return { 'taken', name .. ' is an alias of ' .. owner }
end
for i = first_wanted, #ARGV do
  owner = redis.call('HGET', aliases, ARGV[i])
  if owner and owner ~= name then
    return { 'taken', ARGV[i] .. ' is an alias of ' .. owner }
  end
  if redis.call('HEXISTS', records, ARGV[i]) == 1 then
    return { 'taken', ARGV[i] .. ' is an adapter' }
  end
end

-- Counting begins at the clock's milliseconds, so that no generation comes twice, not even after a flush.
if redis.call('EXISTS', counter) == 0 then
  local time = redis.call('TIME')
  redis.call('SET', counter, string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
end
local generation = string.format('%.0f', redis.call('INCR', counter))

for i = 8, first_wanted - 1 do
  redis.call('HDEL', aliases, ARGV[i])
end
for i = first_wanted, #ARGV do
  redis.call('HSET', aliases, ARGV[i], name)
end
if record == '' then
  redis.call('HDEL', records, name)
else
  redis.call('HSET', records, name, generation .. ' ' .. record)
end
if seed ~= '' then
  redis.call('HSET', seeds, name, seed)
end
redis.call('XADD', changes, 'MAXLEN', 1000, generation .. '-0', 'name', name, 'record', record, 'drain', drain,
  'left', redis.call('HLEN', records))
return { 'done', generation }
