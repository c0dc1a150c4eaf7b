-- Publishes limits. What was set live stays, unless the new limits are live too or ARGV[2] says to return.
-- KEYS: limits. ARGV: source (config | live), 1 to replace live limits, then field and value pairs.
-- Returns 1 if published, 0 if live limits stood in the way.

if ARGV[1] == 'config' and ARGV[2] ~= '1' and redis.call('HGET', KEYS[1], 'source') == 'live' then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'source', ARGV[1], unpack(ARGV, 3))
return 1
