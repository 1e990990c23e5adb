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

#include <cstdint>

#include "all_reduce_rows.cuh"
#include "launch.cuh"
#include "peer_memory.cuh"
#include "peer_sums.cuh"

namespace {

using tvm::ffi::TensorView;

constexpr int kThreads = 512;
constexpr int kAtOnce = 4;  // loads that a thread has in flight
constexpr int64_t kMaxPushBytes = 8 * kPushThreads * kChannels;
constexpr int64_t kMaxOneShotBytes = 1 << 20, kMaxTwoShotBytes = 8 << 20;
constexpr int64_t kMaxBytes[] = {kMaxPushBytes, kMaxOneShotBytes, kMaxTwoShotBytes};

// A tensor as bytes. It may begin and end at any address.
struct Bytes {
  unsigned char* data;
  int64_t size;
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
