-- Deletes the working keys of a batch that has ended, and lets its record expire. KEYS: batch, work, holders, bits,
-- parts.
-- ARGV: task, fence, milliseconds until the record expires. Returns 1, or 0 if the lease is lost.

local job, work, holders, bits, parts = unpack(KEYS)
if not holds(holders, ARGV[1], ARGV[2]) then
  return 0
end
redis.call('DEL', work, holders, bits, parts)
redis.call('PEXPIRE', job, ARGV[3])
return 1
