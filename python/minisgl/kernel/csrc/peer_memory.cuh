// The memory of each rank that all ranks write, and how blocks of all ranks exchange numbers there.
//
// Ranks store and never load over the link: a store does not wait for its answer.
//
// The blocks c of all ranks form a channel. A channel has its own part of each memory and its own
// count of calls, and waits for no other channel; so the number of blocks may change from call to
// call. Counts, marks and flags live on the device, and no argument changes from call to call, so a
// graph can repeat a call. The ranks make the same calls in the same order, each rank on one stream
// at a time; a channel relies on nothing else.
//
// Calls use two buffers in turns (`turn` in the code). Why two suffice, and no rank waits at the
// end of a call: in every call of a channel, each rank learns from every other that it has begun
// the call, by a packet or by a flag. A rank that begins call n has therefore learned that all
// others have begun call n - 1. A kernel touches the memory only after `wait_for_inputs`, when all
// kernels before it have ended. So by then all others have ended call n - 2, and have read all that
// they needed from its buffer. The same holds if the next kernel starts early, since it waits too.
// Sums are stored only after the first meeting of a call, which a rank reaches once it has ended
// the call before; so they need one buffer.
//
// The thread that has read a mark removes it, in the same call, so that the place is empty two
// calls later. Flags only grow, and have 64 bits.

#pragma once

#include <cstdint>

#include "launch.cuh"

constexpr int kMaxRanks = 8, kChannels = 128;
constexpr int kPushThreads = 256;  // of a block that sends packets: one each
constexpr uint64_t kMark = uint64_t(1) << 32;

// The most vectors of 16 bytes that a channel receives in a call. Its share of each rank's numbers
// is rounded up to whole vectors, or to whole rows.
constexpr int kPartVectors = 8192, kSumVectors = 5120;

template <int kWords>
struct alignas(4 * kWords) Words {
  uint32_t word[kWords];
};

// The memory of one rank. It starts as zeros. All ranks write to all of it but the counts.
struct Memory {
  uint64_t num_calls[kChannels];
  uint64_t flags[kChannels][kMaxRanks];                       // from each rank
  ulonglong2 packets[kChannels][2][kMaxRanks][kPushThreads];  // from each rank
  uint4 parts[kChannels][2][kPartVectors];  // what this rank adds up
  uint4 sums[kChannels][kSumVectors];       // one buffer: written after a meeting of the same call
};

struct Group {
  Memory* memory[kMaxRanks];
  int rank, size;
  uint64_t patience_ns;
};

// Waits for another rank, but not forever: it may have died, and the host cannot end a kernel.
class Patience {
 public:
  __device__ explicit Patience(uint64_t limit_ns) : limit_ns_(limit_ns) {}

  __device__ void wait() {
    let_others_run();
    if (++num_waits_ % 1024 != 0) return;
    uint64_t now = nanoseconds();
    if (began_ == 0) began_ = now;
    if (now - began_ > limit_ns_) fail();
  }

 private:
  uint64_t limit_ns_, began_ = 0;
  int num_waits_ = 0;
};

// This block's channel, in one call.
struct Channel {
  const Group& group;
  int c = blockIdx.x;
  uint64_t call = load_fresh(&own().num_calls[c]);
  int turn = call % 2;

  __device__ explicit Channel(const Group& group) : group(group) {}

  __device__ Memory& memory(int rank) const { return *group.memory[rank]; }
  __device__ Memory& own() const { return memory(group.rank); }

  __device__ uint4* parts(int rank) const { return memory(rank).parts[c][turn]; }
  __device__ uint4* sums(int rank) const { return memory(rank).sums[c]; }

  // Steps from 1 to the number of ranks give all ranks, each rank another one first, itself last.
  __device__ int other(int step) const { return (group.rank + step) % group.size; }

  // Where this thread's two marked words from one rank arrive in the memory of another.
  __device__ ulonglong2* packet(int to, int from) const {
    return &memory(to).packets[c][turn][from][threadIdx.x];
  }

  // Waits for both marks at `place`, removes them, and returns the words. `packet` is what was read
  // there first.
  __device__ Words<2> take(ulonglong2* place, ulonglong2 packet) const {
    Patience patience(group.patience_ns);
    while (!(packet.x & packet.y & kMark)) {
      patience.wait();
      packet = load_pair(place);
    }
    store_pair(place, {0, 0});
    return {static_cast<uint32_t>(packet.x), static_cast<uint32_t>(packet.y)};
  }

  // A barrier of the channel: after it, all ranks see what each rank stored before it.
  __device__ void meet(int meeting) const {
    __syncthreads();
    int rank = threadIdx.x;
    if (rank < group.size) {
      uint64_t flag = 2 * call + 1 + meeting;
      store_release(&memory(rank).flags[c][group.rank], flag);
      Patience patience(group.patience_ns);
      while (load_acquire(&own().flags[c][rank]) < flag) patience.wait();
    }
    __syncthreads();
  }

  __device__ void end() const {
    __syncthreads();
    if (threadIdx.x == 0) own().num_calls[c] = call + 1;
  }
};

__device__ inline void store_marked(ulonglong2* place, Words<2> words) {
  store_pair(place, {words.word[0] | kMark, words.word[1] | kMark});
}

__device__ inline void store(uint4* place, Words<4> x) {
  *place = {x.word[0], x.word[1], x.word[2], x.word[3]};
}

// Reads what other ranks have stored.
__device__ inline Words<4> load(const uint4* place) {
  uint4 x = load_fresh(place);
  return {x.x, x.y, x.z, x.w};
}
