-- Writes back what Redis has lost of a registry, by a flush or by evicting keys, unless it was changed meanwhile.
-- KEYS: records, aliases, seeds, generation, changes. ARGV: the generation that the caller has read, '0' for none; for
-- each record its name, the record, the number of its aliases, and those. Returns 1 if written.
-- If nobody knows the records any more, the seeds are dropped, so that configurations are applied again.

local records, aliases, seeds, counter, changes = unpack(KEYS)
if (redis.call('GET', counter) or '0') ~= ARGV[1] then
  return 0
end
if #ARGV == 1 and redis.call('EXISTS', records) == 0 then
  redis.call('DEL', seeds)
end
if ARGV[1] == '0' then
  local time = redis.call('TIME')
  redis.call('SET', counter, string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
end

local generation
local i = 2
while i < #ARGV do
  local name, count = ARGV[i], tonumber(ARGV[i + 2])
  if redis.call('HEXISTS', records, name) == 0 then
    generation = generation or string.format('%.0f', redis.call('INCR', counter))
    redis.call('HSET', records, name, generation .. ' ' .. ARGV[i + 1])
  end
  for j = i + 3, i + 2 + count do
    redis.call('HSETNX', aliases, ARGV[j], name)
  end
  i = i + 3 + count
end
return 1
