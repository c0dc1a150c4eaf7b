-- Ends a finalized batch with the status that is its outcome.
-- KEYS: batch, work, holders, open, and outbox if the tenant is notified. ARGV: task, fence, ids of its files or ''.
-- Returns 1, or 0 if the lease is lost.

local job, work, holders, open, outbox = unpack(KEYS)
if not holds(holders, ARGV[1], ARGV[2]) then
  return 0
end
for i, field in ipairs({ 'output_file_id', 'error_file_id' }) do
  if ARGV[i + 2] ~= '' then
    redis.call('HSET', job, field, ARGV[i + 2])
  end
end
close(job, work, holders, open, outbox, redis.call('HGET', job, 'outcome'), clock())
return 1
