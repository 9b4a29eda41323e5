// A program: a schedule (time-expanded network) as loaded from bytes, and the table that maps its positions to ranks.
// Words: BUILD.md section 2. Bytes are never trusted: Parse() checks every bound, Validate() counts every contribution.
#ifndef JAXCOLL_PROGRAM_PROGRAM_H_
#define JAXCOLL_PROGRAM_PROGRAM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace jaxcoll {

enum class Kind : uint8_t {
  kAllReduce = 0,
  kReduce = 1,
  kBroadcast = 2,
  kAllGather = 3,
  kReduceScatter = 4,
  kAllToAll = 5,
  kPermute = 6,
};
constexpr int kNumKinds = 7;
const char* KindName(Kind kind);
bool Reduces(Kind kind);  // combines contributions; the other kinds only copy

enum class EdgeOp : uint8_t { kCopy = 0, kReduce = 1 };

struct Chunk {
  int16_t src;  // home position of the only source, or -1: all ranks contribute (or the root)
  int16_t dst;  // home position of the only destination, or -1
  uint32_t weight;
  // Derived: where the chunk lies among the chunks that share its block.
  uint32_t index_in_block;
  uint32_t chunks_in_block;
  uint64_t weight_before;
  uint64_t block_weight;
  int32_t graph;  // the only graph that moves it, or -1
};

struct Edge {
  uint16_t step, src, dst;
  EdgeOp op;
  uint32_t first_ref, ref_count;
  uint32_t graph;
  // Transfer (edge e, its k-th chunk) has the number first_transfer + k, the same on every rank.
  uint32_t first_transfer;
};

struct Graph {
  uint32_t first_edge, edge_count;
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

struct Program {
  Kind kind;
  int nranks, root, steps, pipeline;
  bool canonical;  // contributions are combined in the order of their senders' positions
  std::string name;
  uint32_t id;  // hash of the bytes: two ranks that run different programs notice
  std::vector<Chunk> chunks;
  std::vector<Graph> graphs;
  std::vector<Edge> edges;
  std::vector<uint32_t> refs;
  uint32_t num_transfers;

  static Status Parse(const uint8_t* bytes, size_t size, Program* out);

  int input_blocks() const { return kind == Kind::kReduceScatter || kind == Kind::kAllToAll ? nranks : 1; }
  int output_blocks() const { return kind == Kind::kAllGather || kind == Kind::kAllToAll ? nranks : 1; }

  // Elements [begin, end) of its block that a chunk covers, for blocks of n elements.
  Range ChunkRange(uint32_t chunk, int64_t n) const;
  // Lane `lane` of `lanes` of a range.
  static Range LaneRange(Range range, int lane, int lanes);
};

// Permutations are kept once where many vertices share one: a program may have more vertices than memory has room for.
struct Table {
  uint64_t version = 0;
  std::vector<int16_t> home;  // [nranks]
  std::vector<int16_t> rows;  // permutations, [nranks] each; At() says which belongs to a vertex row
  size_t graph_stride = 0, step_stride = 0;

  static Table Identity(const Program& program);
  static Status Parse(const uint8_t* bytes, size_t size, const Program& program, Table* out);

  // [nranks] the ranks at step 0..steps of a graph.
  const int16_t* At(uint32_t graph, int step) const {
    return &rows[size_t{graph} * graph_stride + static_cast<size_t>(step) * step_stride];
  }
};

// True when the program under this table computes its collective: every destination holds each contribution exactly
// once.
Status Validate(const Program& program, const Table& table);

// Whether a rank contributes to / must hold a chunk, under a table's homes.
bool IsSource(const Program& program, const Table& table, const Chunk& chunk, int rank);
bool IsDest(const Program& program, const Table& table, const Chunk& chunk, int rank);

}  // namespace jaxcoll

#endif  // JAXCOLL_PROGRAM_PROGRAM_H_
