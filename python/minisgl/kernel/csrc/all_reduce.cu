// Sums over the ranks of a group, through memory of each rank that all ranks write; alone, or with
// the norm that follows a sum in a model.
//
// The contract is in all_reduce.py. There are three protocols:
//
//   push     Each rank stores its numbers into the memory of every other rank, 4 bytes with a mark
//            at a time, and waits until the marks of the others are in its own memory. One trip
//            over the link; twice the bytes.
//   one_shot Each rank stores its numbers into the memory of every rank, the ranks meet, and each
//            adds up what has arrived.
//   two_shot Each rank stores each shard of its numbers into the memory of the rank that owns it.
//            They meet, and each adds up its own shard and stores the sums into the memory of every
//            rank. They meet again, and each reads what has arrived. The fewest bytes.
//
// Ranks store and never load over the link: a store does not wait for its answer.
//
// A number is added up in float32 and in the order of the ranks, so that all ranks have equal bits.
// With a norm, a block has whole rows, and a thread has one vector of each of its rows. That pays
// where a block has enough to do; so push has no norm.
//
// The blocks c of all ranks form a channel. A channel has its own part of each memory and its own
// count of calls, and waits for no other channel; so the number of blocks may change from call to
// call. Counts, marks and flags live on the device, and no argument changes from call to call, so a
// graph can repeat a call. The ranks make the same calls in the same order, each rank on one stream
// at a time; a channel relies on nothing else.
//
// Calls use two buffers in turns (`turn` in the code). Why two suffice, and no rank waits at the
// end of a call: in every call of a channel, each rank learns from every other that it has begun
// the call, in `push` by a packet and otherwise by a flag. A rank that begins call n has therefore
// learned that all others have begun call n - 1. A kernel touches the memory only after
// `wait_for_inputs`, when all kernels before it have ended. So by then all others have ended call
// n - 2, and have read all that they needed from its buffer. The same holds if the next kernel
// starts early, since it waits too. Sums are stored only after the first meeting of a call, which
// a rank reaches once it has ended the call before; so they need one buffer.
//
// The thread that has read a mark removes it, in the same call, so that the place is empty two
// calls later. Flags only grow, and have 64 bits.

#include <cstdint>

#include "launch.cuh"

namespace {

using tvm::ffi::TensorView;

constexpr int kMaxRanks = 8, kChannels = 128;
constexpr int kPushThreads = 256, kThreads = 512;
constexpr int kAtOnce = 4, kRanksAtOnce = 4;  // loads that a thread has in flight
constexpr int64_t kMaxPushBytes = 8 * kPushThreads * kChannels;
constexpr int64_t kMaxOneShotBytes = 1 << 20, kMaxTwoShotBytes = 8 << 20;
constexpr int64_t kMaxBytes[] = {kMaxPushBytes, kMaxOneShotBytes, kMaxTwoShotBytes};
constexpr int kMaxRowVectors = 1024;  // one for each thread of a block
constexpr uint64_t kMark = uint64_t(1) << 32;

// The most vectors of 16 bytes that a channel receives in a call. Its share of each rank's numbers
// is rounded up to whole vectors, or to whole rows.
constexpr int kPartVectors = 8192, kSumVectors = 5120;

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

// A tensor as bytes. It may begin and end at any address.
struct Bytes {
  unsigned char* data;
  int64_t size;
};

template <int kWords>
struct alignas(4 * kWords) Words {
  uint32_t word[kWords];
};

template <int kWords>
__device__ bool is_whole(Bytes x, int64_t i) {
  constexpr int kSize = 4 * kWords;
  return reinterpret_cast<uintptr_t>(x.data) % kSize == 0 && (i + 1) * kSize <= x.size;
}

// Bytes past the end are read as zero, and are not written.
template <int kWords>
__device__ Words<kWords> read(Bytes x, int64_t i) {
  if (is_whole<kWords>(x, i)) return reinterpret_cast<const Words<kWords>*>(x.data)[i];
  Words<kWords> value{};
#pragma unroll
  for (int k = 0; k < 4 * kWords; ++k) {
    int64_t at = i * 4 * kWords + k;
    if (at < x.size) value.word[k / 4] |= uint32_t(x.data[at]) << k % 4 * 8;
  }
  return value;
}

template <int kWords>
__device__ void write(Bytes x, int64_t i, Words<kWords> value) {
  if (is_whole<kWords>(x, i)) {
    reinterpret_cast<Words<kWords>*>(x.data)[i] = value;
    return;
  }
#pragma unroll
  for (int k = 0; k < 4 * kWords; ++k) {
    int64_t at = i * 4 * kWords + k;
    if (at < x.size) x.data[at] = static_cast<unsigned char>(value.word[k / 4] >> k % 4 * 8);
  }
}

// How a word of 32 bits holds numbers: two of 16 bits, or one of 32.
struct BFloat16 {
  __device__ static void add(float (&sum)[2], uint32_t word) {
    sum[0] += __int_as_float(static_cast<int>(word << 16));
    sum[1] += __int_as_float(static_cast<int>(word & 0xffff0000));
  }
  __device__ static uint32_t round(const float (&sum)[2]) { return pack(sum[0], sum[1]); }
};

struct Float16 {
  __device__ static void add(float (&sum)[2], uint32_t word) {
    float2 numbers = unpack_float16(word);
    sum[0] += numbers.x;
    sum[1] += numbers.y;
  }
  __device__ static uint32_t round(const float (&sum)[2]) { return pack_float16(sum[0], sum[1]); }
};

struct Float32 {
  __device__ static void add(float (&sum)[2], uint32_t word) {
    sum[0] += __int_as_float(static_cast<int>(word));
  }
  __device__ static uint32_t round(const float (&sum)[2]) {
    return static_cast<uint32_t>(__float_as_int(sum[0]));
  }
};

// Adds up the words of all ranks, in the order of the ranks. `load(r)` begins to read those of rank
// r, and `words_of` turns what it returns into words. The loads of kRanksAtOnce ranks overlap.
template <class Number, int kWords, class Load, class WordsOf>
__device__ Words<kWords> sum_over(int num_ranks, Load load, WordsOf words_of) {
  float sum[kWords][2] = {};
#pragma unroll
  for (int begin = 0; begin < kMaxRanks; begin += kRanksAtOnce) {
    decltype(load(0)) loaded[kRanksAtOnce];
#pragma unroll
    for (int r = begin; r < begin + kRanksAtOnce; ++r)
      if (r < num_ranks) loaded[r - begin] = load(r);
#pragma unroll
    for (int r = begin; r < begin + kRanksAtOnce; ++r) {
      if (r >= num_ranks) continue;
      Words<kWords> words = words_of(r, loaded[r - begin]);
#pragma unroll
      for (int w = 0; w < kWords; ++w) Number::add(sum[w], words.word[w]);
    }
  }
  Words<kWords> result;
#pragma unroll
  for (int w = 0; w < kWords; ++w) result.word[w] = Number::round(sum[w]);
  return result;
}

// Calls `use` with each index below `num` that is this thread's, and with what `load` returns for
// it. The loads of kAtOnce indices overlap.
template <class Load, class Use>
__device__ void for_each(int num, Load load, Use use) {
  for (int begin = threadIdx.x; begin < num; begin += kAtOnce * kThreads) {
    Words<4> value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (begin + i * kThreads < num) value[i] = load(begin + i * kThreads);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (begin + i * kThreads < num) use(begin + i * kThreads, value[i]);
  }
}

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

__device__ void store_marked(ulonglong2* place, Words<2> words) {
  store_pair(place, {words.word[0] | kMark, words.word[1] | kMark});
}

// Adds up this thread's words and those of the other ranks r, which arrive at `place_of(r)`.
template <class Number, class PlaceOf>
__device__ Words<2> add_packets(const Channel& channel, Words<2> mine, PlaceOf place_of) {
  int rank = channel.group.rank;
  return sum_over<Number, 2>(
      channel.group.size,
      [&](int r) { return r == rank ? ulonglong2{} : load_pair(place_of(r)); },
      [&](int r, ulonglong2 packet) { return r == rank ? mine : channel.take(place_of(r), packet); });
}

__device__ void store(uint4* place, Words<4> x) {
  *place = {x.word[0], x.word[1], x.word[2], x.word[3]};
}

// Reads what other ranks have stored.
__device__ Words<4> load(const uint4* place) {
  uint4 x = load_fresh(place);
  return {x.x, x.y, x.z, x.w};
}

// Adds up the vectors of all ranks r, which are at `place_of(r)`.
template <class Number, class PlaceOf>
__device__ Words<4> add_vectors(int num_ranks, PlaceOf place_of) {
  return sum_over<Number, 4>(
      num_ranks, [&](int r) { return load(place_of(r)); }, [](int, Words<4> words) { return words; });
}

template <class Number>
__global__ void __launch_bounds__(kPushThreads)
    push(const __grid_constant__ Group group, const Bytes x) {
  wait_for_inputs();
  let_next_start();
  Channel channel(group);
  int64_t i = int64_t(blockIdx.x) * kPushThreads + threadIdx.x;
  if (i * 8 < x.size) {
    Words<2> mine = read<2>(x, i);
    for (int step = 1; step < group.size; ++step)
      store_marked(channel.packet(channel.other(step), group.rank), mine);
    auto place_of = [&](int r) { return channel.packet(group.rank, r); };
    write(x, i, add_packets<Number>(channel, mine, place_of));
  }
  channel.end();
}

template <class Number>
__global__ void __launch_bounds__(kThreads)
    one_shot(const __grid_constant__ Group group, const Bytes x) {
  wait_for_inputs();
  let_next_start();
  Channel channel(group);
  int num_vectors = static_cast<int>((x.size + 15) / 16);
  int share = (num_vectors + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  int num = min(share, num_vectors - first);
  for_each(
      num, [&](int k) { return read<4>(x, first + k); },
      [&](int k, Words<4> value) {
        for (int step = 1; step <= group.size; ++step)
          store(channel.parts(channel.other(step)) + share * group.rank + k, value);
      });
  channel.meet(0);
  const uint4* parts = channel.parts(group.rank);
  for_each(
      num,
      [&](int k) {
        return add_vectors<Number>(group.size, [&](int r) { return parts + share * r + k; });
      },
      [&](int k, Words<4> sum) { write(x, first + k, sum); });
  channel.end();
}

// A channel has a share of each shard.
template <class Number>
__global__ void __launch_bounds__(kThreads)
    two_shot(const __grid_constant__ Group group, const Bytes x) {
  wait_for_inputs();
  let_next_start();
  Channel channel(group);
  int num_vectors = static_cast<int>((x.size + 15) / 16);
  int shard = (num_vectors + group.size - 1) / group.size;
  int share = (shard + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  auto for_each_of_shard = [&](int s, auto load, auto use) {
    for_each(min(min(share, shard - first), num_vectors - shard * s - first), load, use);
  };
  for (int step = 1; step <= group.size; ++step) {
    int owner = channel.other(step);
    uint4* parts = channel.parts(owner) + share * group.rank;
    for_each_of_shard(
        owner, [&](int k) { return read<4>(x, shard * owner + first + k); },
        [&](int k, Words<4> value) { store(parts + k, value); });
  }
  channel.meet(0);
  const uint4* parts = channel.parts(group.rank);
  for_each_of_shard(
      group.rank,
      [&](int k) {
        return add_vectors<Number>(group.size, [&](int r) { return parts + share * r + k; });
      },
      [&](int k, Words<4> sum) {
        for (int step = 1; step < group.size; ++step)
          store(channel.sums(channel.other(step)) + share * group.rank + k, sum);
        write(x, shard * group.rank + first + k, sum);
      });
  channel.meet(1);
  for (int step = 1; step < group.size; ++step) {
    int owner = channel.other(step);
    const uint4* sums = channel.sums(group.rank) + share * owner;
    for_each_of_shard(
        owner, [&](int k) { return load(sums + k); },
        [&](int k, Words<4> sum) { write(x, shard * owner + first + k, sum); });
  }
  channel.end();
}

// The rows that are added up, and the norm of their sums. If `adds_residual`, the norm is of sum
// plus residual; `residual` receives what is normed.
struct Rows {
  unsigned char *x, *residual, *y;
  const unsigned char* weight;
  bool adds_residual;
  float eps;
  int num, width, vectors;  // rows; numbers and vectors of 16 bytes in a row

  __device__ Words<4>* vector(unsigned char* rows, int t) const {
    return reinterpret_cast<Words<4>*>(rows) + int64_t(t) * vectors + threadIdx.x;
  }
  __device__ bool has_vector() const { return static_cast<int>(threadIdx.x) < vectors; }
};

// The sum of x over the threads of the block. Two calls in a row must differ in `parity`: they use
// different buffers, so that one barrier is enough.
__device__ float sum_over_block(float x, int num_warps, int parity) {
  __shared__ float of_warps[2][kMaxRowVectors / 32];
  auto sum_over_warp = [](float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return x;
  };
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum = sum_over_warp(x);
  if (lane == 0) of_warps[parity][warp] = sum;
  __syncthreads();
  return sum_over_warp(lane < num_warps ? of_warps[parity][lane] : 0);
}

// The norm of this block's rows. Numbers are rounded where separate kernels would round them; only
// the squares are added up in another order.
template <class Number>
struct RowNorm {
  const Rows& rows;
  Words<4> weight{};

  __device__ explicit RowNorm(const Rows& rows) : rows(rows) {
    if (rows.has_vector())
      weight = reinterpret_cast<const Words<4>*>(rows.weight)[threadIdx.x];
  }

  __device__ Words<4> residual(int t) const {
    Words<4> value{};
    if (rows.adds_residual && rows.has_vector()) value = *rows.vector(rows.residual, t);
    return value;
  }

  // Finishes row t, whose sum over the ranks is `sum`. The block has finished `num_before` rows.
  __device__ void finish(int t, int num_before, Words<4> sum, Words<4> residual) const {
    float squares = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float number[2] = {};
      Number::add(number, sum.word[w]);
      Number::add(number, residual.word[w]);
      sum.word[w] = Number::round(number);
      float rounded[2] = {};
      Number::add(rounded, sum.word[w]);
      squares += rounded[0] * rounded[0] + rounded[1] * rounded[1];
    }
    if (!rows.has_vector()) squares = 0;
    int num_warps = (rows.vectors + 31) / 32;
    float sum_of_squares = sum_over_block(squares, num_warps, num_before % 2);
    float scale = rsqrtf(sum_of_squares / static_cast<float>(rows.width) + rows.eps);
    if (!rows.has_vector()) return;
    *rows.vector(rows.residual, t) = sum;
    Words<4> normed;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float number[2] = {}, factor[2] = {};
      Number::add(number, sum.word[w]);
      Number::add(factor, weight.word[w]);
      number[0] = number[0] * scale * factor[0];
      number[1] = number[1] * scale * factor[1];
      normed.word[w] = Number::round(number);
    }
    *rows.vector(rows.y, t) = normed;
  }
};

template <class Number>
__global__ void __launch_bounds__(kMaxRowVectors)
    one_shot_rows(const __grid_constant__ Group group, const __grid_constant__ Rows rows) {
  RowNorm<Number> norm(rows);
  wait_for_inputs();
  let_next_start();
  Channel channel(group);
  int share = (rows.num + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  int num = min(share, rows.num - first);
  auto place = [&](int to, int from, int i) {
    return channel.parts(to) + (share * from + i) * rows.vectors + threadIdx.x;
  };
  if (rows.has_vector())
    for (int i = 0; i < num; ++i) {
      Words<4> mine = *rows.vector(rows.x, first + i);
      for (int step = 1; step <= group.size; ++step)
        store(place(channel.other(step), group.rank, i), mine);
    }
  Words<4> residual = num > 0 ? norm.residual(first) : Words<4>{};
  channel.meet(0);
  for (int i = 0; i < num; ++i) {
    Words<4> sum{};
    if (rows.has_vector())
      sum = add_vectors<Number>(group.size, [&](int r) { return place(group.rank, r, i); });
    norm.finish(first + i, i, sum, residual);
    if (i + 1 < num) residual = norm.residual(first + i + 1);
  }
  channel.end();
}

// Rank r adds up those rows of a channel whose number is r modulo the number of ranks.
template <class Number>
__global__ void __launch_bounds__(kMaxRowVectors)
    two_shot_rows(const __grid_constant__ Group group, const __grid_constant__ Rows rows) {
  RowNorm<Number> norm(rows);
  wait_for_inputs();
  let_next_start();
  Channel channel(group);
  int share = (rows.num + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  int end = min(first + share, rows.num);
  auto part = [&](int to, int from, int t) {
    int place = (t - first) / group.size * group.size + from;
    return channel.parts(to) + place * rows.vectors + threadIdx.x;
  };
  auto sum_at = [&](int to, int t) {
    return channel.sums(to) + (t - first) * rows.vectors + threadIdx.x;
  };
  if (rows.has_vector())
    for (int begin = first; begin < end; begin += kAtOnce) {
      Words<4> value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (begin + i < end) value[i] = *rows.vector(rows.x, begin + i);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int t = begin + i;
        if (t < end) store(part(t % group.size, group.rank, t), value[i]);
      }
    }
  channel.meet(0);
  if (rows.has_vector())
    for (int t = first; t < end; ++t) {
      if (t % group.size != group.rank) continue;
      Words<4> sum =
          add_vectors<Number>(group.size, [&](int r) { return part(group.rank, r, t); });
      for (int step = 1; step <= group.size; ++step) store(sum_at(channel.other(step), t), sum);
    }
  Words<4> residual = first < end ? norm.residual(first) : Words<4>{};
  channel.meet(1);
  for (int t = first; t < end; ++t) {
    Words<4> sum = rows.has_vector() ? load(sum_at(group.rank, t)) : Words<4>{};
    norm.finish(t, t - first, sum, residual);
    if (t + 1 < end) residual = norm.residual(t + 1);
  }
  channel.end();
}

// The kernels of a protocol. Its number is that of `Protocol` in all_reduce.py.
struct Protocol {
  void (*add_up)(Group, Bytes);
  int num_threads, bytes_of_thread;
  void (*add_up_rows)(Group, Rows);  // may be null
};

template <class Number>
Protocol protocol_of(int64_t number) {
  if (number == 0) return {push<Number>, kPushThreads, 8, nullptr};
  if (number == 1) return {one_shot<Number>, kThreads, 16, one_shot_rows<Number>};
  return {two_shot<Number>, kThreads, 16, two_shot_rows<Number>};
}

Protocol protocol_of(int64_t number, DLDataType dtype) {
  if (dtype.code == kDLBfloat) return protocol_of<BFloat16>(number);
  if (dtype.bits == 16) return protocol_of<Float16>(number);
  return protocol_of<Float32>(number);
}

// `address` has the address of each rank's memory, and is a tensor on the host.
Group group_of(TensorView address, int64_t rank, int64_t patience_ns) {
  Group group{};
  group.rank = static_cast<int>(rank);
  group.size = static_cast<int>(address.size(0));
  group.patience_ns = static_cast<uint64_t>(patience_ns);
  for (int r = 0; r < group.size; ++r)
    group.memory[r] = reinterpret_cast<Memory*>(data_of<const int64_t>(address)[r]);
  return group;
}

int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

}  // namespace

int64_t peer_memory_bytes() { return sizeof(Memory); }

int64_t max_bytes_of_protocol(int64_t number) { return kMaxBytes[number]; }

// Whether `all_reduce_rows` takes `num_rows` rows of `row_bytes` bytes.
bool takes_rows(int64_t num_rows, int64_t row_bytes, int64_t number, int64_t num_ranks) {
  int64_t vectors = row_bytes / 16, share = divide_up(num_rows, kChannels);
  if (row_bytes % 16 != 0 || vectors > kMaxRowVectors) return false;
  if (num_rows * row_bytes > kMaxBytes[number]) return false;
  if (number == 0) return false;
  int64_t parts = number == 1 ? share : divide_up(share, num_ranks);
  return share * vectors <= kSumVectors && parts * num_ranks * vectors <= kPartVectors;
}

void all_reduce(TensorView x, int64_t number, TensorView address, int64_t rank,
                int64_t patience_ns) {
  Bytes bytes{data_of<unsigned char>(x), x.numel() * x.dtype().bits / 8};
  Protocol protocol = protocol_of(number, x.dtype());
  int64_t bytes_of_block = int64_t(protocol.num_threads) * protocol.bytes_of_thread;
  int64_t num_blocks = min(divide_up(bytes.size, bytes_of_block), int64_t(kChannels));
  launch(x.device(), static_cast<int>(num_blocks), protocol.num_threads, protocol.add_up,
         group_of(address, rank, patience_ns), bytes);
}

// Without a residual, `residual` is x itself, and is only written.
void all_reduce_rows(TensorView x, TensorView residual, TensorView weight, double eps, TensorView y,
                     int64_t number, TensorView address, int64_t rank, int64_t patience_ns) {
  Rows rows{};
  rows.x = data_of<unsigned char>(x);
  rows.residual = data_of<unsigned char>(residual);
  rows.y = data_of<unsigned char>(y);
  rows.weight = data_of<unsigned char>(weight);
  rows.adds_residual = rows.residual != rows.x;
  rows.eps = static_cast<float>(eps);
  rows.num = static_cast<int>(x.size(0));
  rows.width = static_cast<int>(x.size(1));
  rows.vectors = rows.width * x.dtype().bits / 128;
  int num_threads = static_cast<int>(divide_up(rows.vectors, 32)) * 32;
  int64_t rows_of_block = divide_up(rows.num, kChannels);
  launch(x.device(), static_cast<int>(divide_up(rows.num, rows_of_block)), num_threads,
         protocol_of(number, x.dtype()).add_up_rows, group_of(address, rank, patience_ns), rows);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_bytes, peer_memory_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(max_bytes_of_protocol, max_bytes_of_protocol);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(takes_rows, takes_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce, all_reduce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce_rows, all_reduce_rows);
