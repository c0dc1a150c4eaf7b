-- Nothing is left to do for a batch that has ended. KEYS: batch, work, holders, bits, parts.
-- ARGV: task, fence, milliseconds until it is forgotten. Returns 1; 0: the lease is lost.

local job, work, holders, bits, parts = unpack(KEYS)
if not holds(holders, ARGV[1], ARGV[2]) then
  return 0
end
redis.call('DEL', work, holders, bits, parts)
redis.call('PEXPIRE', job, ARGV[3])
return 1
