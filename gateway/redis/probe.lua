-- Calls each command that scripts of the limiter call, so that it fails while Redis refuses one of them in its present
-- state. KEYS: a key that nothing else uses.

local key = KEYS[1]
-- First, because a server without memory lets a script go on that has begun with a command that frees some.
redis.call('SET', key, '1', 'PX', 60000)
redis.call('TIME')
redis.call('GET', key)
redis.call('EXISTS', key)
redis.call('DEL', key)
redis.call('HSET', key, 'field', 1)
redis.call('HGET', key, 'field')
redis.call('HMGET', key, 'field')
redis.call('HLEN', key)
redis.call('PEXPIREAT', key, 4102444800000)
redis.call('DEL', key)
redis.call('ZADD', key, 1, 'member')
redis.call('ZCOUNT', key, 0, 1)
redis.call('ZRANGE', key, 0, 0)
redis.call('ZREM', key, 'other')
redis.call('ZREMRANGEBYSCORE', key, 2, 3)
redis.call('DEL', key)
redis.call('SADD', key, 'member')
redis.call('SREM', key, 'other')
redis.call('PEXPIRE', key, 60000)
return 1
