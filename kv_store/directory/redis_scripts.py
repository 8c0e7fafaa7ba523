"""Scripts that Redis runs in one step each. Each touches one key, a node's hash:

    member    the StoreMember, as msgpack
    address   of the member's node, apart for look-ups
    sequence  number of the last message taken in; absent: a snapshot is needed
    gone      instead of all these: the node left
    16 bytes  a block's hash: its tier, one character

The key's expiry is the node's lease, so whatever is known of a node ends in one moment. Touching one key
makes a script run on any Redis Cluster. Scripts are sent as text (EVAL): Redis finds them by their digest,
and there is nothing to load again after a restart or fail-over.
"""

GONE, NEW, KNOWN = -1, 0, 1

# KEYS: node. ARGV: member, address, lease in ms, number of the last message acknowledged to the caller ('':
# none). A number below that one means that Redis fell back to an older state. Returns GONE, NEW or KNOWN.
RENEW = """
local node = KEYS[1]
if redis.call('HEXISTS', node, 'gone') == 1 then return -1 end
redis.call('HSET', node, 'member', ARGV[1], 'address', ARGV[2])
redis.call('PEXPIRE', node, ARGV[3])
local last = redis.call('HGET', node, 'sequence')
if not last then return 0 end
if ARGV[4] ~= '' and tonumber(last) < tonumber(ARGV[4]) then
  redis.call('HDEL', node, 'sequence')
  return 0
end
return 1
"""

# KEYS: node. ARGV: sequence number, '1' for a snapshot's first message, removed hashes one behind the other,
# stored ones likewise with a character for the tier behind each. Returns NEW or KNOWN.
# UNLINK frees a large table outside the server's loop; 500 pairs at once stay below Lua's stack.
PUBLISH = """
local node, number = KEYS[1], tonumber(ARGV[1])
local known = redis.call('HMGET', node, 'member', 'address', 'sequence')
if not known[1] then return 0 end
local last = tonumber(known[3] or '')
if last and number <= last then return 1 end
if ARGV[2] == '1' then
  local left_ms = math.max(redis.call('PTTL', node), 1)
  redis.call('UNLINK', node)
  redis.call('HSET', node, 'member', known[1], 'address', known[2])
  redis.call('PEXPIRE', node, left_ms)
elseif not last or number ~= last + 1 then
  redis.call('HDEL', node, 'sequence')
  return 0
end
redis.call('HSET', node, 'sequence', ARGV[1])
local removed, stored = ARGV[3], ARGV[4]
for from = 1, #removed, 16 * 500 do
  local fields = {}
  for at = from, math.min(from + 16 * 500, #removed + 1) - 1, 16 do
    fields[#fields + 1] = string.sub(removed, at, at + 15)
  end
  redis.call('HDEL', node, unpack(fields))
end
for from = 1, #stored, 17 * 500 do
  local pairs_ = {}
  for at = from, math.min(from + 17 * 500, #stored + 1) - 1, 17 do
    pairs_[#pairs_ + 1] = string.sub(stored, at, at + 15)
    pairs_[#pairs_ + 1] = string.sub(stored, at + 16, at + 16)
  end
  redis.call('HSET', node, unpack(pairs_))
end
return 1
"""

# KEYS: nodes. ARGV: hashes, one behind the other, at most 4096. Returns for each node false, if it is no
# member, or its address and one character for each hash: the tier, or '-'; '' if it has none of them.
LOOK_UP = """
local fields = {'address'}
for at = 1, #ARGV[1], 16 do fields[#fields + 1] = string.sub(ARGV[1], at, at + 15) end
local answers = {}
for i, node in ipairs(KEYS) do
  local found = redis.call('HMGET', node, unpack(fields))
  local address, has_any = found[1], false
  for j = 2, #found do
    if found[j] then has_any = true else found[j] = '-' end
  end
  answers[i] = address and {address, has_any and table.concat(found, '', 2) or ''}
end
return answers
"""

# KEYS: node. ARGV: how long to remember, in ms.
LEAVE = """
redis.call('UNLINK', KEYS[1])
redis.call('HSET', KEYS[1], 'gone', 1)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""
