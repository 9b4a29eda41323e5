#include "program/program.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>

namespace jaxcoll {
namespace {

constexpr uint32_t kMaxCount = 1u << 26;  // chunks, edges, references: a bound on what a file may ask for

const std::array<uint32_t, 256>& CrcTable() {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = (c & 1) ? 0xedb88320u ^ (c >> 1) : c >> 1;
      t[i] = c;
    }
    return t;
  }();
  return table;
}

uint32_t Crc32(const uint8_t* p, size_t n) {
  uint32_t c = 0xffffffffu;
  for (size_t i = 0; i < n; ++i) c = CrcTable()[(c ^ p[i]) & 0xff] ^ (c >> 8);
  return c ^ 0xffffffffu;
}

// Reads little-endian fields; past the end it yields zeros and remembers that it failed.
class Reader {
 public:
  Reader(const uint8_t* p, size_t n) : p_(p), n_(n) {}
  template <typename T>
  T Get() {
    T v{};
    if (n_ - at_ < sizeof(T)) {
      failed_ = true;
      at_ = n_;
      return v;
    }
    memcpy(&v, p_ + at_, sizeof(T));
    at_ += sizeof(T);
    return v;
  }
  std::string Text(size_t len) {
    if (n_ - at_ < len) {
      failed_ = true;
      at_ = n_;
      return {};
    }
    std::string s(reinterpret_cast<const char*>(p_ + at_), len);
    at_ += len;
    return s;
  }
  void AlignTo(size_t a) { at_ = std::min(n_, (at_ + a - 1) / a * a); }
  size_t left() const { return n_ - at_; }
  bool failed() const { return failed_; }

 private:
  const uint8_t* p_;
  size_t n_, at_ = 0;
  bool failed_ = false;
};

Status CheckFrame(const uint8_t* bytes, size_t size, const char* magic, const char* what, size_t crc_at) {
  if (bytes == nullptr || size < crc_at + 4 || memcmp(bytes, magic, 4) != 0)
    return Status::Error(Format("%s: not %s bytes (magic missing or too short: %zu bytes)", what, magic, size));
  uint16_t version;
  uint32_t total, crc;
  memcpy(&version, bytes + 4, 2);
  memcpy(&total, bytes + 8, 4);
  memcpy(&crc, bytes + crc_at, 4);
  if (version != 1) return Status::Error(Format("%s: version %u, this library reads version 1", what, version));
  if (total != size) return Status::Error(Format("%s: the header says %u bytes, there are %zu", what, total, size));
  if (Crc32(bytes + crc_at + 4, size - crc_at - 4) != crc)
    return Status::Error(Format("%s: checksum differs, the bytes are damaged", what));
  return {};
}

bool IsPermutation(const int16_t* p, int n) {
  std::vector<bool> seen(static_cast<size_t>(n));
  for (int i = 0; i < n; ++i) {
    if (p[i] < 0 || p[i] >= n || seen[static_cast<size_t>(p[i])]) return false;
    seen[static_cast<size_t>(p[i])] = true;
  }
  return true;
}

// Well-formed as RFC 3629 says: no overlong forms, no surrogates.
bool IsUtf8(const std::string& s) {
  size_t i = 0;
  while (i < s.size()) {
    auto c = static_cast<uint8_t>(s[i]);
    size_t more = c < 0x80 ? 0 : c >= 0xc2 && c < 0xe0 ? 1 : (c & 0xf0) == 0xe0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : 4;
    if (more == 4 || s.size() - i <= more) return false;
    for (size_t k = 1; k <= more; ++k)
      if ((static_cast<uint8_t>(s[i + k]) & 0xc0) != 0x80) return false;
    auto second = more > 0 ? static_cast<uint8_t>(s[i + 1]) : 0;
    if ((c == 0xe0 && second < 0xa0) || (c == 0xed && second > 0x9f) || (c == 0xf0 && second < 0x90) ||
        (c == 0xf4 && second > 0x8f))
      return false;
    i += more + 1;
  }
  return true;
}

bool HasSource(Kind kind) { return kind == Kind::kAllGather || kind == Kind::kAllToAll || kind == Kind::kPermute; }
bool HasDest(Kind kind) { return kind == Kind::kReduceScatter || kind == Kind::kAllToAll || kind == Kind::kPermute; }

Status CheckChunkEnds(const Program& p, const Chunk& c, size_t i) {
  auto valid = [&](int v) { return v >= 0 && v < p.nranks; };
  if (HasSource(p.kind) ? !valid(c.src) : c.src != -1)
    return Status::Error(Format("program %s: chunk %zu has source %d", p.name.c_str(), i, c.src));
  if (HasDest(p.kind) ? !valid(c.dst) : c.dst != -1)
    return Status::Error(Format("program %s: chunk %zu has destination %d", p.name.c_str(), i, c.dst));
  return {};
}

struct Block {
  uint64_t weight = 0;
  uint32_t count = 0;
};
using Blocks = std::map<std::pair<int, int>, Block>;

// Every block of the collective must lie in some chunk, and a permutation may fill a result only once.
Status CheckCoverage(const Program& p, const Blocks& blocks) {
  auto n = static_cast<uint64_t>(p.nranks);
  if (p.kind == Kind::kPermute) {
    std::vector<bool> filled(n);
    for (const auto& [ends, block] : blocks) {
      auto dst = static_cast<size_t>(ends.second);
      if (filled[dst])
        return Status::Error(
            Format("program %s: position %zu of the permutation has several sources", p.name.c_str(), dst));
      filled[dst] = true;
    }
    return {};
  }
  uint64_t wanted = (HasSource(p.kind) ? n : 1) * (HasDest(p.kind) ? n : 1);
  if (blocks.size() != wanted)
    return Status::Error(Format("program %s: its chunks cover %zu of %llu blocks", p.name.c_str(), blocks.size(),
                                static_cast<unsigned long long>(wanted)));
  return {};
}

// Fills in what follows from the parsed fields: places in blocks, owners, transfer numbers.
Status Derive(Program* p) {
  Blocks blocks;
  for (size_t i = 0; i < p->chunks.size(); ++i) {
    Chunk& c = p->chunks[i];
    JC_RETURN_IF_ERROR(CheckChunkEnds(*p, c, i));
    Block& b = blocks[{c.src, c.dst}];
    c.index_in_block = b.count++;
    c.weight_before = b.weight;
    b.weight += c.weight;
    c.graph = -1;
  }
  for (Chunk& c : p->chunks) {
    const Block& b = blocks[{c.src, c.dst}];
    c.chunks_in_block = b.count;
    c.block_weight = b.weight;
    if (b.weight == 0) return Status::Error("program " + p->name + ": the chunks of a block have no weight");
  }
  JC_RETURN_IF_ERROR(CheckCoverage(*p, blocks));
  uint64_t transfers = 0;
  for (size_t g = 0; g < p->graphs.size(); ++g) {
    const Graph& graph = p->graphs[g];
    for (uint32_t e = graph.first_edge; e < graph.first_edge + graph.edge_count; ++e) {
      Edge& edge = p->edges[e];
      edge.graph = static_cast<uint32_t>(g);
      edge.first_transfer = static_cast<uint32_t>(transfers);
      transfers += edge.ref_count;
      if (e > graph.first_edge && p->edges[e - 1].step > edge.step)
        return Status::Error(Format("program %s: edge %u stands before an earlier step", p->name.c_str(), e));
      for (uint32_t k = 0; k < edge.ref_count; ++k) {
        int32_t& owner = p->chunks[p->refs[edge.first_ref + k]].graph;
        if (owner >= 0 && owner != static_cast<int32_t>(g))
          return Status::Error(
              Format("program %s: two graphs move chunk %u", p->name.c_str(), p->refs[edge.first_ref + k]));
        owner = static_cast<int32_t>(g);
      }
    }
  }
  if (transfers > kMaxCount) return Status::Error("program " + p->name + ": too many transfers");
  p->num_transfers = static_cast<uint32_t>(transfers);
  return {};
}

}  // namespace

const char* KindName(Kind kind) {
  static const char* const names[] = {"all_reduce",     "reduce",     "broadcast", "all_gather",
                                      "reduce_scatter", "all_to_all", "permute"};
  return static_cast<int>(kind) < kNumKinds ? names[static_cast<int>(kind)] : "unknown";
}

bool Reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter; }

Status Program::Parse(const uint8_t* bytes, size_t size, Program* out) {
  JC_RETURN_IF_ERROR(CheckFrame(bytes, size, "JXCP", "schedule program", 12));
  Reader r(bytes, size);
  r.Text(6);
  uint16_t flags = r.Get<uint16_t>();
  r.Text(8);
  uint8_t kind = r.Get<uint8_t>();
  r.Get<uint8_t>();
  Program p;
  p.nranks = r.Get<uint16_t>();
  p.root = r.Get<int16_t>();
  p.steps = r.Get<uint16_t>();
  uint32_t ngraphs = r.Get<uint16_t>();
  p.pipeline = r.Get<uint16_t>();
  uint32_t nchunks = r.Get<uint32_t>(), nedges = r.Get<uint32_t>(), nrefs = r.Get<uint32_t>();
  uint16_t name_len = r.Get<uint16_t>();
  p.name = r.Text(name_len);
  r.AlignTo(4);
  p.canonical = flags & 1;
  if (r.failed()) return Status::Error("schedule program: truncated header");
  if (kind >= kNumKinds || p.nranks < 1 || p.nranks > 32767 || p.pipeline < 1)
    return Status::Error(
        Format("schedule program %s: kind %u, %d ranks, pipeline %d", p.name.c_str(), kind, p.nranks, p.pipeline));
  if (!IsUtf8(p.name)) return Status::Error("schedule program: its name is not UTF-8");
  if (flags > 1)
    return Status::Error(
        Format("schedule program %s: unknown flags %x, it comes from a newer jaxcoll", p.name.c_str(), flags));
  p.kind = static_cast<Kind>(kind);
  bool rooted = p.kind == Kind::kReduce || p.kind == Kind::kBroadcast;
  if (rooted ? (p.root < 0 || p.root >= p.nranks) : p.root != -1)
    return Status::Error(Format("schedule program %s: root %d of %d ranks", p.name.c_str(), p.root, p.nranks));
  uint64_t need = uint64_t{nchunks} * 8 + uint64_t{ngraphs} * 8 + uint64_t{nedges} * 16 + uint64_t{nrefs} * 4;
  if (nchunks > kMaxCount || nedges > kMaxCount || nrefs > kMaxCount || need != r.left())
    return Status::Error(Format("schedule program %s: its tables need %llu bytes, %zu follow", p.name.c_str(),
                                static_cast<unsigned long long>(need), r.left()));
  p.chunks.resize(nchunks);
  for (Chunk& c : p.chunks) {
    c.src = r.Get<int16_t>();
    c.dst = r.Get<int16_t>();
    c.weight = r.Get<uint32_t>();
  }
  p.graphs.resize(ngraphs);
  uint64_t next_edge = 0;
  for (Graph& g : p.graphs) {
    g.first_edge = r.Get<uint32_t>();
    g.edge_count = r.Get<uint32_t>();
    if (g.first_edge != next_edge || next_edge + g.edge_count > nedges)
      return Status::Error("schedule program " + p.name + ": the graphs don't cover the edges in order");
    next_edge += g.edge_count;
  }
  if (next_edge != nedges) return Status::Error("schedule program " + p.name + ": edges outside every graph");
  p.edges.resize(nedges);
  uint64_t next_ref = 0;
  for (Edge& e : p.edges) {
    e.step = r.Get<uint16_t>();
    e.src = r.Get<uint16_t>();
    e.dst = r.Get<uint16_t>();
    uint8_t op = r.Get<uint8_t>();
    r.Get<uint8_t>();
    e.first_ref = r.Get<uint32_t>();
    e.ref_count = r.Get<uint32_t>();
    if (e.step >= p.steps || e.src >= p.nranks || e.dst >= p.nranks || op > 1 || e.first_ref != next_ref ||
        e.ref_count == 0 || next_ref + e.ref_count > nrefs)
      return Status::Error(
          Format("schedule program %s: edge %u->%u at step %u is out of range", p.name.c_str(), e.src, e.dst, e.step));
    e.op = static_cast<EdgeOp>(op);
    if (e.op == EdgeOp::kReduce && !Reduces(p.kind))
      return Status::Error(Format("schedule program %s: edge %u->%u at step %u reduces, but %s only copies",
                                  p.name.c_str(), e.src, e.dst, e.step, KindName(p.kind)));
    next_ref += e.ref_count;
  }
  if (next_ref != nrefs) return Status::Error("schedule program " + p.name + ": references of no edge");
  p.refs.resize(nrefs);
  for (uint32_t& c : p.refs) {
    c = r.Get<uint32_t>();
    if (c >= nchunks) return Status::Error(Format("schedule program %s: no chunk %u", p.name.c_str(), c));
  }
  p.id = Crc32(bytes, size);
  JC_RETURN_IF_ERROR(Derive(&p));
  *out = std::move(p);
  return {};
}

Range Program::ChunkRange(uint32_t chunk, int64_t n) const {
  const Chunk& c = chunks[chunk];
  int64_t q = n >= 64 * int64_t{c.chunks_in_block} ? 16 : 1;
  auto boundary = [&](uint32_t i, uint64_t before) -> int64_t {
    if (i == c.chunks_in_block || before == c.block_weight) return n;  // chunks of weight 0 at the end stay empty
    auto at = static_cast<int64_t>(static_cast<unsigned __int128>(n) * before / c.block_weight);
    return at / q * q;
  };
  return {boundary(c.index_in_block, c.weight_before), boundary(c.index_in_block + 1, c.weight_before + c.weight)};
}

Range Program::LaneRange(Range range, int lane, int lanes) {
  int64_t m = range.size(), q = m >= 64 * int64_t{lanes} ? 16 : 1;
  auto boundary = [&](int l) { return l == lanes ? m : m * l / lanes / q * q; };
  return {range.begin + boundary(lane), range.begin + boundary(lane + 1)};
}

Table Table::Identity(const Program& program) {
  Table t;
  t.home.resize(static_cast<size_t>(program.nranks));
  for (int i = 0; i < program.nranks; ++i) t.home[static_cast<size_t>(i)] = static_cast<int16_t>(i);
  t.rows = t.home;
  return t;
}

Status Table::Parse(const uint8_t* bytes, size_t size, const Program& program, Table* out) {
  JC_RETURN_IF_ERROR(CheckFrame(bytes, size, "JXCT", "rank table", 12));
  Reader r(bytes, size);
  r.Text(6);
  uint16_t scope = r.Get<uint16_t>();
  r.Text(8);
  Table t;
  t.version = r.Get<uint64_t>();
  int nranks = r.Get<uint16_t>();
  size_t graphs = r.Get<uint16_t>();
  int steps = r.Get<uint16_t>();
  r.Get<uint16_t>();
  if (r.failed() || scope > 2) return Status::Error("rank table: truncated or of an unknown scope");
  if (nranks != program.nranks || graphs != program.graphs.size() || steps != program.steps)
    return Status::Error(Format("rank table: made for %d ranks, %zu graphs, %d steps; program %s has %d, %zu, %d",
                                nranks, graphs, steps, program.name.c_str(), program.nranks, program.graphs.size(),
                                program.steps));
  auto n = static_cast<size_t>(nranks), steps_rows = static_cast<size_t>(steps) + 1;
  size_t perms = scope == 0 ? 1 : scope == 1 ? graphs : graphs * steps_rows;
  if (r.left() != (perms + 1) * n * 2) return Status::Error("rank table: wrong number of permutations");
  for (size_t i = 0; i < n; ++i) t.home.push_back(r.Get<int16_t>());
  for (size_t i = 0; i < perms * n; ++i) t.rows.push_back(r.Get<int16_t>());
  for (size_t k = 0; k <= (graphs == 0 ? 0 : perms); ++k) {  // without graphs the rows are filling
    const int16_t* p = k == 0 ? t.home.data() : &t.rows[(k - 1) * n];
    if (!IsPermutation(p, nranks))
      return Status::Error(Format("rank table: row %zu is no permutation of 0..%d", k, nranks - 1));
  }
  t.graph_stride = scope == 0 ? 0 : scope == 1 ? n : n * steps_rows;
  t.step_stride = scope == 2 ? n : 0;
  *out = std::move(t);
  return {};
}

bool IsSource(const Program& p, const Table& t, const Chunk& c, int rank) {
  if (p.kind == Kind::kBroadcast) return t.home[static_cast<size_t>(p.root)] == rank;
  return c.src < 0 || t.home[static_cast<size_t>(c.src)] == rank;
}

bool IsDest(const Program& p, const Table& t, const Chunk& c, int rank) {
  if (p.kind == Kind::kReduce) return t.home[static_cast<size_t>(p.root)] == rank;
  return c.dst < 0 || t.home[static_cast<size_t>(c.dst)] == rank;
}

namespace {

// Runs one chunk through its edges on contribution counts: state[rank][source]. Where nothing is reduced there is one
// source.
class ChunkCounter {
 public:
  ChunkCounter(const Program& p, const Table& t)
      : p_(p), t_(t), n_(static_cast<size_t>(p.nranks)), columns_(Reduces(p.kind) ? n_ : 1) {}

  Status Run(uint32_t chunk, const std::vector<uint32_t>& edges) {
    const Chunk& c = p_.chunks[chunk];
    state_.assign(n_ * columns_, 0);
    for (size_t r = 0; r < n_; ++r)
      if (IsSource(p_, t_, c, static_cast<int>(r))) state_[r * columns_ + (columns_ > 1 ? r : 0)] = 1;
    for (size_t i = 0; i < edges.size();) {
      size_t j = i;
      while (j < edges.size() && p_.edges[edges[j]].step == p_.edges[edges[i]].step) ++j;
      JC_RETURN_IF_ERROR(Step(chunk, &edges[i], j - i));
      i = j;
    }
    // A chunk without weight holds no element: nothing of it has to arrive.
    return c.weight == 0 ? Status() : CheckResult(chunk, c);
  }

 private:
  Status Step(uint32_t chunk, const uint32_t* edges, size_t count) {
    before_ = state_;
    touched_.assign(n_, 0);  // 0 nothing yet, 1 copy, 2 reduce
    for (size_t i = 0; i < count; ++i) {
      const Edge& e = p_.edges[edges[i]];
      auto s = static_cast<size_t>(t_.At(e.graph, e.step)[e.src]);
      auto d = static_cast<size_t>(t_.At(e.graph, e.step + 1)[e.dst]);
      auto fail = [&](const char* why) {
        return Status::Error(Format("program %s, graph %u, step %u, edge %u->%u (ranks %zu->%zu), chunk %u: %s",
                                    p_.name.c_str(), e.graph, e.step, e.src, e.dst, s, d, chunk, why));
      };
      if (s == d) return fail("both ends are one rank");
      const uint8_t* from = &before_[s * columns_];
      if (std::all_of(from, from + columns_, [](uint8_t v) { return v == 0; }))
        return fail("the sender holds nothing of this chunk yet");
      bool copy = e.op == EdgeOp::kCopy;
      if (touched_[d] == 1 || (copy && touched_[d] != 0))
        return fail("a copy meets another message into the same vertex");
      uint8_t* to = &state_[d * columns_];
      if (copy) std::fill(to, to + columns_, uint8_t{0});
      for (size_t k = 0; k < columns_; ++k) to[k] = static_cast<uint8_t>(std::min(255, to[k] + from[k]));
      touched_[d] = copy ? 1 : 2;
    }
    return {};
  }

  Status CheckResult(uint32_t chunk, const Chunk& c) const {
    for (size_t r = 0; r < n_; ++r) {
      if (!IsDest(p_, t_, c, static_cast<int>(r))) continue;
      for (size_t k = 0; k < columns_; ++k)
        if (int held = state_[r * columns_ + k]; held != 1)
          return Status::Error(
              Format("program %s: rank %zu ends with chunk %u holding contribution %zu %d times, not once",
                     p_.name.c_str(), r, chunk, k, held));
    }
    return {};
  }

  const Program& p_;
  const Table& t_;
  size_t n_, columns_;
  std::vector<uint8_t> state_, before_, touched_;
};

// The root of a rooted collective and the pairs of a permutation are the caller's: a table must leave them where they
// are.
Status CheckHomes(const Program& p, const Table& t) {
  if (p.root >= 0 && t.home[static_cast<size_t>(p.root)] != p.root)
    return Status::Error(Format("program %s: the table moves the root from rank %d to rank %d", p.name.c_str(), p.root,
                                t.home[static_cast<size_t>(p.root)]));
  if (p.kind != Kind::kPermute) return {};
  std::set<std::pair<int, int>> wanted;
  for (const Chunk& c : p.chunks) wanted.emplace(c.src, c.dst);
  for (const Chunk& c : p.chunks) {
    int src = t.home[static_cast<size_t>(c.src)], dst = t.home[static_cast<size_t>(c.dst)];
    if (wanted.count({src, dst}) == 0)
      return Status::Error(
          Format("program %s: the table moves data from rank %d to %d, which the permutation doesn't ask for",
                 p.name.c_str(), src, dst));
  }
  return {};
}

}  // namespace

Status Validate(const Program& program, const Table& table) {
  JC_RETURN_IF_ERROR(CheckHomes(program, table));
  std::vector<std::vector<uint32_t>> edges_of(program.chunks.size());
  for (uint32_t e = 0; e < program.edges.size(); ++e)
    for (uint32_t k = 0; k < program.edges[e].ref_count; ++k) {
      auto& list = edges_of[program.refs[program.edges[e].first_ref + k]];
      if (!list.empty() && list.back() == e)
        return Status::Error(Format("program %s: edge %u names a chunk twice", program.name.c_str(), e));
      list.push_back(e);
    }
  // All contributions, or all results, of a chunk need an edge a rank. Asked first: a forged number of ranks gets no
  // memory.
  size_t least = HasDest(program.kind) && !Reduces(program.kind) ? 0 : static_cast<size_t>(program.nranks) - 1;
  for (uint32_t c = 0; c < program.chunks.size(); ++c)
    if (program.chunks[c].weight != 0 && edges_of[c].size() < least)
      return Status::Error(Format("program %s: chunk %u moves over %zu edges, %d ranks need %zu at least",
                                  program.name.c_str(), c, edges_of[c].size(), program.nranks, least));
  ChunkCounter counter(program, table);
  for (uint32_t c = 0; c < program.chunks.size(); ++c) JC_RETURN_IF_ERROR(counter.Run(c, edges_of[c]));
  return {};
}

}  // namespace jaxcoll
