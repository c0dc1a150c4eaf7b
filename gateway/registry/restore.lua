-- Writes back a registry that was lost, unless another gateway has done so or has begun a new one.
-- KEYS: records, aliases, generation, changes. ARGV: for each record its name, the record, the number of its aliases,
-- and those. Returns 1 if written.

local records, aliases, counter, changes = unpack(KEYS)
if redis.call('EXISTS', counter) == 1 then
  return 0
end
local time = redis.call('TIME')
local generation = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('SET', counter, generation)
local i = 1
while i < #ARGV do
  local name, count = ARGV[i], tonumber(ARGV[i + 2])
  redis.call('HSET', records, name, generation .. ' ' .. ARGV[i + 1])
  for j = i + 3, i + 2 + count do
    redis.call('HSET', aliases, ARGV[j], name)
  end
  i = i + 3 + count
end
return 1
