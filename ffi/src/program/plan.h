// A plan: what ONE rank does for a program under a table, as a graph of nodes that is independent of the message's
// size. The executor runs one copy of the graph per lane.
#ifndef JAXCOLL_PROGRAM_PLAN_H_
#define JAXCOLL_PROGRAM_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "program/program.h"

namespace jaxcoll {

// Where a rank keeps a value of a chunk. Input is the operand (read only), Output the result, Scratch is ours.
enum class SlotKind : uint8_t { kNone, kInput, kOutput, kScratch };

struct Slot {
  SlotKind kind = SlotKind::kNone;
  uint16_t block = 0;    // kInput, kOutput: the block of the operand or result
  uint32_t scratch = 0;  // kScratch: index in Plan::scratch
  bool wide = false;     // holds f32 partial sums of a narrow type
  bool operator==(const Slot& o) const {
    return kind == o.kind && block == o.block && scratch == o.scratch && wide == o.wide;
  }
};

struct Incoming {
  uint32_t transfer;
  uint32_t edge;
  uint16_t peer;    // rank
  bool wide;        // what travels: f32 partial sums, or values of the type itself
  uint32_t record;  // which of the rank's incoming edges this is part of: one telemetry record each
};

enum class NodeKind : uint8_t { kVertex, kSend, kCopy, kZero };

struct Node {
  NodeKind kind;
  bool reduce = false;  // kVertex: combines, else the one incoming value replaces
  bool wide = false;    // kSend: what travels
  uint16_t peer = 0;    // kSend: rank
  uint32_t chunk = 0;
  uint32_t transfer = 0, edge = 0;    // kSend
  uint32_t value = 0;                 // kSend: which value is read; sends of the same value share a number
  uint32_t first_in = 0, num_in = 0;  // kVertex: incoming [first_in, first_in + num_in)
  uint32_t own_place = 0;  // kVertex: the own value goes before this incoming (canonical order), if src holds one
  Slot src, dst;           // kVertex: own value and where the result goes; kSend: what is read; kCopy: both
  uint32_t num_deps = 0;
  uint32_t first_next = 0, num_next = 0;  // successors in Plan::next
};

struct ScratchSlot {
  uint32_t chunk;
  bool wide;
};

struct Plan {
  std::shared_ptr<const Program> program;
  std::shared_ptr<const Table> table;
  int rank = 0;
  bool wide = false;
  std::vector<Node> nodes;
  std::vector<Incoming> incoming;
  std::vector<uint32_t> next;
  std::vector<uint32_t> roots;  // nodes without dependencies
  std::vector<ScratchSlot> scratch;
  std::vector<int32_t> recv_of_transfer;   // [num_transfers] index into incoming, -1: not ours
  std::vector<int32_t> send_of_transfer;   // [num_transfers] index into nodes, -1
  std::vector<uint32_t> node_of_incoming;  // [incoming]
  std::vector<uint32_t> value_readers;     // [value] sends that read it
  uint32_t max_fan_in = 0;                 // most incoming transfers of one node
  std::vector<uint32_t> record_edges;      // [records] the edge
};

// The edges [first, last) of one graph at one step.
struct GraphPart {
  uint32_t graph;
  int step;
  uint32_t first, last;
};
// All edges of a program by step, then by graph. Nothing where there are no edges: a small file may have 65535 steps
// and as many graphs.
std::vector<GraphPart> Parts(const Program& program);

// `wide`: the type is narrow (bf16, f16, fp8) and sums are kept in f32 until all contributions are in.
// The program must have passed Validate() with this table.
std::shared_ptr<const Plan> CompilePlan(std::shared_ptr<const Program> program, std::shared_ptr<const Table> table,
                                        int rank, bool wide);

}  // namespace jaxcoll

#endif  // JAXCOLL_PROGRAM_PLAN_H_
