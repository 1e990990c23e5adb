// Sums over the ranks of a group, through memory of each rank that all ranks write and read.
//
// The contract stands in all_reduce.py. There are three protocols:
//
//   push     Each rank stores its numbers into the memory of every other rank, 4 bytes together with
//            a mark, and waits until the marks of the others are in its own memory. One way over
//            the link; twice the bytes.
//   pull     Each rank copies its numbers into its own memory, the ranks meet, and each reads those
//            of all ranks.
//   two_shot Each rank copies its numbers, the ranks meet, and each adds up one shard. They meet
//            again, and each reads the sums of the other shards. The fewest bytes.
//
// A number is added up in float32 and in the order of the ranks, so that all ranks have equal bits.
//
// Block c of every rank are a channel. A channel has its own part of each memory and its own count
// of calls, and waits for no other channel; so the number of blocks may change from call to call.
// Counts, marks and flags live on the device, and no argument changes from call to call, so a graph
// can repeat a call. The ranks make the same calls in the same order, each rank on one stream at a
// time: that is all a channel needs to know.
//
// Why two turns suffice, and nobody waits at the end of a call: in every call of a channel, each
// rank hears from every other that it has begun the call: by a packet in `push`, by a flag else. A
// rank that begins call n has therefore heard that all others have begun call n - 1. A kernel
// touches the memory only after `wait_for_inputs`, when all kernels before it have ended. So by then
// all others have ended call n - 2, and what they had to read of that turn is read. The same holds
// if the next kernel starts early, since it waits too.
//
// A mark is removed by the one who has read it, in the same call, so that the place is empty two
// calls later. Flags only grow and have 64 bits.

#include <cstdint>

#include "launch.cuh"

namespace {

using tvm::ffi::TensorView;

constexpr int kMaxRanks = 8, kChannels = 128;
constexpr int kPushThreads = 256, kThreads = 512;
constexpr int kAtOnce = 4;  // loads of a thread that overlap
constexpr int64_t kMaxPushBytes = 8 * kPushThreads * kChannels;
constexpr int64_t kMaxPullBytes = 1 << 20, kMaxTwoShotBytes = 8 << 20;
constexpr uint64_t kMark = uint64_t(1) << 32;

// What a channel holds of a tensor is rounded up to whole vectors, once by shard and once by block.
constexpr int kVectors = kMaxTwoShotBytes / 16 / kChannels + 2 * kMaxRanks;

// The memory of one rank. It is zero at first.
struct Memory {
  uint64_t num_calls[kChannels];         // of this rank
  uint64_t flags[kChannels][kMaxRanks];  // from each rank
  ulonglong2 packets[kChannels][2][kMaxRanks][kPushThreads];  // from each rank
  uint4 vectors[kChannels][2][kVectors];  // of this rank, for all to read
};

struct Group {
  Memory* memory[kMaxRanks];
  int rank, size;
  uint64_t patience_ns;
};

// A tensor as bytes. It may begin and end anywhere.
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

// What lies behind the end reads as zero and is not written.
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

// The numbers in a word of 32 bits.
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

// Adds up what `of_rank` returns, in the order of the ranks.
template <class Number, int kWords, class OfRank>
__device__ Words<kWords> sum_over(int num_ranks, OfRank of_rank) {
  Words<kWords> words[kMaxRanks], result;
#pragma unroll
  for (int r = 0; r < kMaxRanks; ++r)
    if (r < num_ranks) words[r] = of_rank(r);
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    float sum[2] = {};
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r)
      if (r < num_ranks) Number::add(sum, words[r].word[w]);
    result.word[w] = Number::round(sum);
  }
  return result;
}

// Calls `use` with each of the numbers below `num` that fall to this thread, and with what `load`
// returns for it. Some are loaded before the first is used.
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

// Waits for another rank. One that died must not be waited for forever: no host can end a kernel.
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

  __device__ Memory& own() const { return *group.memory[group.rank]; }

  __device__ void send(int rank, Words<2> words) const {
    ulonglong2* place = &group.memory[rank]->packets[c][turn][group.rank][threadIdx.x];
    store_pair(place, {words.word[0] | kMark, words.word[1] | kMark});
  }

  __device__ Words<2> receive(int rank) const {
    ulonglong2* place = &own().packets[c][turn][rank][threadIdx.x];
    Patience patience(group.patience_ns);
    ulonglong2 packet = load_pair(place);
    while (!(packet.x & packet.y & kMark)) {
      patience.wait();
      packet = load_pair(place);
    }
    store_pair(place, {0, 0});
    return {static_cast<uint32_t>(packet.x), static_cast<uint32_t>(packet.y)};
  }

  __device__ uint4* vectors(int rank) const { return group.memory[rank]->vectors[c][turn]; }

  __device__ void put(int k, Words<4> value) const {
    vectors(group.rank)[k] = {value.word[0], value.word[1], value.word[2], value.word[3]};
  }

  __device__ Words<4> get(int rank, int k) const {
    uint4 value = load_fresh(vectors(rank) + k);
    return {value.x, value.y, value.z, value.w};
  }

  // What each rank has put before this is there for all ranks after it.
  __device__ void meet(int meeting) const {
    __syncthreads();
    int rank = threadIdx.x;
    if (rank < group.size) {
      uint64_t flag = 2 * call + 1 + meeting;
      store_release(&group.memory[rank]->flags[c][group.rank], flag);
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
      channel.send((group.rank + step) % group.size, mine);
    auto of_rank = [&](int r) { return r == group.rank ? mine : channel.receive(r); };
    write(x, i, sum_over<Number, 2>(group.size, of_rank));
  }
  channel.end();
}

template <class Number>
__global__ void __launch_bounds__(kThreads)
    pull(const __grid_constant__ Group group, const Bytes x) {
  wait_for_inputs();
  let_next_start();
  Channel channel(group);
  int num_vectors = static_cast<int>((x.size + 15) / 16);
  int share = (num_vectors + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  int num = min(share, num_vectors - first);
  for_each(
      num, [&](int k) { return read<4>(x, first + k); },
      [&](int k, Words<4> value) { channel.put(k, value); });
  channel.meet(0);
  for_each(
      num,
      [&](int k) {
        return sum_over<Number, 4>(group.size, [&](int r) { return channel.get(r, k); });
      },
      [&](int k, Words<4> sum) { write(x, first + k, sum); });
  channel.end();
}

// A channel has a share of each shard: the vectors from `shard * s + first` on lie at `share * s`.
template <class Number>
__global__ void __launch_bounds__(kThreads)
    two_shot(const __grid_constant__ Group group, const Bytes x) {
  wait_for_inputs();
  let_next_start();
  Channel channel(group);
  int num_vectors = static_cast<int>((x.size + 15) / 16);
  int shard = (num_vectors + group.size - 1) / group.size;
  int share = (shard + gridDim.x - 1) / gridDim.x, first = blockIdx.x * share;
  int num = min(share, shard - first);
  auto for_each_of_shard = [&](int s, auto load, auto use) {
    for_each(min(num, num_vectors - shard * s - first), load, use);
  };
  for (int s = 0; s < group.size; ++s)
    for_each_of_shard(
        s, [&](int k) { return read<4>(x, shard * s + first + k); },
        [&](int k, Words<4> value) { channel.put(share * s + k, value); });
  channel.meet(0);
  int mine = group.rank;
  for_each_of_shard(
      mine,
      [&](int k) {
        auto of_rank = [&](int r) { return channel.get(r, share * mine + k); };
        return sum_over<Number, 4>(group.size, of_rank);
      },
      [&](int k, Words<4> sum) { channel.put(share * mine + k, sum); });
  channel.meet(1);
  for (int step = 0; step < group.size; ++step) {
    int s = (mine + step) % group.size;
    for_each_of_shard(
        s, [&](int k) { return channel.get(s, share * s + k); },
        [&](int k, Words<4> sum) { write(x, shard * s + first + k, sum); });
  }
  channel.end();
}

using Kernel = void (*)(Group, Bytes);

struct Protocol {
  Kernel kernel;
  int num_threads, bytes_of_thread;
  int64_t max_bytes;
};

// The numbers of the protocols are those of all_reduce.py.
template <class Number>
Protocol protocol_of(int64_t number) {
  if (number == 0) return {push<Number>, kPushThreads, 8, kMaxPushBytes};
  if (number == 1) return {pull<Number>, kThreads, 16, kMaxPullBytes};
  return {two_shot<Number>, kThreads, 16, kMaxTwoShotBytes};
}

Protocol protocol_of(int64_t number, DLDataType dtype) {
  if (dtype.code == kDLBfloat) return protocol_of<BFloat16>(number);
  if (dtype.bits == 16) return protocol_of<Float16>(number);
  return protocol_of<Float32>(number);
}

}  // namespace

int64_t peer_memory_bytes() { return sizeof(Memory); }

int64_t max_bytes_of_protocol(int64_t number) { return protocol_of<Float32>(number).max_bytes; }

// `address` holds the address of the memory of each rank, and lies on the host.
void all_reduce(TensorView x, int64_t number, TensorView address, int64_t rank,
                int64_t patience_ns) {
  Group group{};
  group.rank = static_cast<int>(rank);
  group.size = static_cast<int>(address.size(0));
  group.patience_ns = static_cast<uint64_t>(patience_ns);
  for (int r = 0; r < group.size; ++r)
    group.memory[r] = reinterpret_cast<Memory*>(data_of<const int64_t>(address)[r]);
  Bytes bytes{data_of<unsigned char>(x), x.numel() * x.dtype().bits / 8};
  Protocol protocol = protocol_of(number, x.dtype());
  int64_t bytes_of_block = int64_t(protocol.num_threads) * protocol.bytes_of_thread;
  int64_t num_blocks = min((bytes.size + bytes_of_block - 1) / bytes_of_block, int64_t(kChannels));
  launch(x.device(), static_cast<int>(num_blocks), protocol.num_threads, protocol.kernel, group,
         bytes);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_memory_bytes, peer_memory_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(max_bytes_of_protocol, max_bytes_of_protocol);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(all_reduce, all_reduce);
