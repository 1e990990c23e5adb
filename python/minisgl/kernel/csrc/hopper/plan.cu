// Plans which multiprocessor takes which tile of which prompt, on the host.
//
// A multiprocessor takes a tile of queries with all its keys. Where that would leave some idle, as
// with two tiles for three of them, tiles are cut into parts of their keys, and the multiprocessor
// that finishes the last part of a tile merges the parts ("Stream-K", Osama et al. 2023,
// arXiv:2301.03598; "Flash-Decoding", Dao et al. 2023).
#ifndef __CUDA_ARCH__  // nothing in here runs on a GPU
#include "steps.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <utility>

namespace prompts {
namespace {

// The unit of time is the time in which a tile of queries attends to one key.
constexpr int kBeginAndEnd = 2 * kTileQ;  // time of a tile or part besides that for its keys
constexpr int kJoin = 1024;               // time to merge all parts: cutting has to save more
constexpr int kLeastKeys = 768;           // the fewest keys of a part
constexpr double kSlack = 1.02;           // margin of a share: parts begin and end at whole pages
constexpr double kGrowth = 1.08;          // step by which the share grows until all tiles fit

struct Tile {
  int prompt, tile, head;
  int num_keys;         // keys that are read: up to the last one that the last query sees
  int num_common_keys;  // keys before its first query, which all its queries see
};

// A piece of work of one multiprocessor: a tile, or some of its keys.
struct Item {
  int tile, head, first_query, first_page, num_queries, num_keys;
  int part = -1;
};
constexpr int kColumns = sizeof(Item) / sizeof(int);

struct Schedule {
  std::vector<std::vector<Item>> items;  // one list for each processor
  std::vector<Part> parts;
  double time = 0;
};

using Load = std::pair<double, int>;  // the time of a processor, and its number
using Loads = std::priority_queue<Load, std::vector<Load>, std::greater<Load>>;

int count_processors() {
  int device, num_processors;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, device);
  return num_processors;
}

// The first key that the kernel reads for a tile of queries. `before` keys come before its first
// query. With a window, the kernel begins one tile of keys before the tile that has the window's
// first key (FlashInfer's get_swa_begin_kv_tile_idx).
int first_key(const Prompts& prompts, int before) {
  if (prompts.window_left < 0) return 0;
  const int kv_tile = prompts.has_pages ? kPagedTileKV : kRaggedTileKV;
  const int64_t num_hidden = std::max<int64_t>(0, before - prompts.window_left);
  return std::max(0, static_cast<int>(num_hidden / kv_tile) - 1) * kv_tile;
}

double time_of(const Tile& tile) { return tile.num_keys + kBeginAndEnd; }

// The tiles of a head are side by side, since they read the same keys. Among these, the longest
// prompts come first, and of a prompt the last tiles, which have the most keys.
std::vector<Tile> tiles_of(const Prompts& prompts) {
  std::vector<int> order(prompts.num_prompts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return prompts.kv_length[a] > prompts.kv_length[b]; });
  std::vector<Tile> tiles;
  for (int head = 0; head < prompts.num_heads; ++head)
    for (int i : order) {
      const int num_queries = prompts.qo_indptr[i + 1] - prompts.qo_indptr[i];
      const int num_keys = prompts.kv_length[i];
      for (int tile = (num_queries + kTileQ - 1) / kTileQ - 1; tile >= 0; --tile) {
        const int before = num_keys - num_queries + tile * kTileQ;
        const int end = std::min(num_keys, before + kTileQ);
        tiles.push_back({i, tile, head, std::max(0, end - first_key(prompts, before)),
                         std::max(0, before)});
      }
    }
  return tiles;
}

Item whole(const Prompts& prompts, const Tile& tile) {
  const int i = tile.prompt;
  return {tile.tile,
          tile.head,
          prompts.qo_indptr[i],
          prompts.kv_indptr[i],
          prompts.qo_indptr[i + 1] - prompts.qo_indptr[i],
          prompts.kv_length[i]};
}

Schedule schedule_whole(const Prompts& prompts, const std::vector<Tile>& tiles,
                        int num_processors) {
  Schedule schedule{std::vector<std::vector<Item>>(num_processors)};
  Loads loads;
  for (int processor = 0; processor < num_processors; ++processor) loads.push({0, processor});
  for (const Tile& tile : tiles) {
    auto [load, processor] = loads.top();
    loads.pop();
    schedule.items[processor].push_back(whole(prompts, tile));
    loads.push({load + time_of(tile), processor});
    schedule.time = std::max(schedule.time, load + time_of(tile));
  }
  return schedule;
}

// The time of each processor if all had equal times.
double even_time(const std::vector<Tile>& tiles, int num_processors) {
  double total = 0;
  for (const Tile& tile : tiles) total += time_of(tile);
  return total / num_processors;
}

// Tiles that fit the share of a processor stay whole. The others are cut, and fill what is left of
// the shares. What does not fit then goes to the last processor.
//
// A processor takes at most one part that is not the last of its tile, and the last processor takes
// none. So there are at most two parts for each other processor.
//
// share: the time that each processor may take. tiles: the longest first.
Schedule fill_shares(const Prompts& prompts, const std::vector<Tile>& tiles, int num_processors,
                     double share) {
  Schedule schedule{std::vector<std::vector<Item>>(num_processors)};
  std::vector<double> loads(num_processors);
  std::vector<Tile> to_cut;
  Loads order;
  for (int processor = 0; processor < num_processors; ++processor) order.push({0, processor});
  for (const Tile& tile : tiles) {
    auto [load, processor] = order.top();
    if (load + time_of(tile) > share) {
      to_cut.push_back(tile);
      continue;
    }
    order.pop();
    loads[processor] = load + time_of(tile);
    schedule.items[processor].push_back(whole(prompts, tile));
    order.push({loads[processor], processor});
  }

  const int page_size = static_cast<int>(prompts.page_size);
  int processor = 0;
  auto give = [&](const Item& item, int num_keys) {
    schedule.items[processor].push_back(item);
    loads[processor] += num_keys + kBeginAndEnd;
  };
  for (const Tile& tile : to_cut) {
    const Item all = whole(prompts, tile);
    const int num_queries = std::min(kTileQ, all.num_queries - tile.tile * kTileQ);
    const int first_part = static_cast<int>(schedule.parts.size());
    int begin = 0;  // the first key that is left
    auto add_part = [&] {
      schedule.parts.push_back({first_part, 0, num_queries, 0});
      return static_cast<int>(schedule.parts.size()) - 1;
    };
    for (; processor + 1 < num_processors; ++processor) {
      const int room = static_cast<int>(share - loads[processor]) - kBeginAndEnd;
      if (room >= tile.num_keys - begin) break;
      const int end = std::min(begin + room, tile.num_common_keys) / page_size * page_size;
      if (end - begin < kLeastKeys) continue;
      // All queries see all of these keys. So the causal mask must not hide any: the item counts
      // one query, which sees all keys of the part.
      give({0, tile.head, all.first_query + tile.tile * kTileQ, all.first_page + begin / page_size,
            1, end - begin, add_part()},
           end - begin);
      begin = end;
    }
    Item rest = all;
    rest.first_page += begin / page_size;
    rest.num_keys -= begin;
    if (begin > 0) rest.part = add_part();
    give(rest, tile.num_keys - begin);
    for (size_t i = first_part; i < schedule.parts.size(); ++i)
      schedule.parts[i].num = static_cast<int>(schedule.parts.size()) - first_part;
  }
  schedule.time = *std::max_element(loads.begin(), loads.end());
  return schedule;
}

// The schedule with the least share in which all tiles fit, or a share a little larger.
//
// whole_time: the time that whole tiles take. With a larger share, tiles are not worth cutting.
Schedule schedule_cut(const Prompts& prompts, std::vector<Tile> tiles, int num_processors,
                      double whole_time) {
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Tile& a, const Tile& b) { return a.num_keys > b.num_keys; });
  double share = kSlack * even_time(tiles, num_processors) + kBeginAndEnd;
  Schedule schedule = fill_shares(prompts, tiles, num_processors, share);
  while (schedule.time > share && share < whole_time) {
    share *= kGrowth;
    schedule = fill_shares(prompts, tiles, num_processors, share);
  }
  schedule.time += kJoin;
  return schedule;
}

}  // namespace

// The plan in memory: where the pages of each prompt begin in the list of all pages; where the
// items of each processor begin; the parts; and the items, column by column.
std::vector<int64_t> make_plan(const PlanMemory& memory, const Prompts& prompts,
                               bool is_for_graph, int max_parts, cudaStream_t stream) {
  const int num_processors = count_processors();
  const std::vector<Tile> tiles = tiles_of(prompts);
  Schedule schedule = schedule_whole(prompts, tiles, num_processors);
  // With a window, tiles stay whole. A part before the last one counts one query, so the kernel
  // would count the windows of all its queries from the end of the part.
  const bool may_cut = max_parts > 0 && prompts.window_left < 0;
  if (may_cut && schedule.time > even_time(tiles, num_processors) + kJoin) {
    Schedule cut = schedule_cut(prompts, tiles, num_processors, schedule.time);
    const bool has_room = cut.parts.size() <= static_cast<size_t>(max_parts);
    if (has_room && cut.time < schedule.time) schedule = std::move(cut);
  }
  int64_t max_items = tiles.size() + schedule.parts.size();
  if (is_for_graph) {
    const int64_t max_tiles = (prompts.num_tokens + kTileQ - 1) / kTileQ + prompts.num_prompts - 1;
    max_items = max_tiles * prompts.num_heads + max_parts;
  }
  const int64_t work_indptr = prompts.num_prompts + 1;
  const int64_t end = work_indptr + num_processors + 1;
  const int64_t first_part = (end + 3) / 4 * 4;  // at a multiple of 16 bytes
  const int64_t first_item = first_part + 4 * max_parts;
  const size_t num_bytes = sizeof(int32_t) * (first_item + kColumns * max_items);
  if (num_bytes > memory.num_bytes) return {};

  auto* numbers = static_cast<int32_t*>(memory.pinned_numbers);
  std::copy(prompts.kv_indptr, prompts.kv_indptr + work_indptr, numbers);
  std::copy(schedule.parts.begin(), schedule.parts.end(),
            reinterpret_cast<Part*>(numbers + first_part));
  int64_t num_items = 0;
  for (int processor = 0; processor < num_processors; ++processor) {
    numbers[work_indptr + processor] = static_cast<int32_t>(num_items);
    for (const Item& item : schedule.items[processor]) {
      const auto* values = reinterpret_cast<const int*>(&item);
      for (int column = 0; column < kColumns; ++column)
        numbers[first_item + column * max_items + num_items] = values[column];
      ++num_items;
    }
  }
  numbers[work_indptr + num_processors] = static_cast<int32_t>(num_items);
  const cudaError_t error = cudaMemcpyAsync(memory.numbers, memory.pinned_numbers, num_bytes,
                                            cudaMemcpyHostToDevice, stream);
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  return {work_indptr, first_part, first_item, max_items};
}

Work work_of(const std::vector<int64_t>& plan, void* memory) {
  auto* numbers = static_cast<int32_t*>(memory);
  auto column = [&](int number) { return numbers + plan[2] + number * plan[3]; };
  return {numbers + plan[0], column(1), column(0), column(2), column(3),
          column(4),         column(5), column(6), reinterpret_cast<const Part*>(numbers + plan[1])};
}

}  // namespace prompts
#endif  // __CUDA_ARCH__
