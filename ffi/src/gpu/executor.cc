// Team::Enqueue: fills a rank's streams with one execution. See launch_plan.h for the order and why it can't deadlock.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/clock.h"
#include "gpu/monitor.h"
#include "gpu/placement.h"
#include "gpu/team.h"

namespace jaxcoll {
namespace gpu {
namespace {

constexpr unsigned kNonBlockingStream = 1;
constexpr unsigned kTimingEvent = 0;
constexpr int kDeviceToDevice = 3;
constexpr uint32_t kMaxLanes = 64;

}  // namespace

class Enqueuer {
 public:
  Enqueuer(Team* team, Member* member, const OpRequest& request, std::shared_ptr<const LaunchPlan> plan, Stream main)
      : team_(*team),
        api_(*team->api_),
        m_(*member),
        r_(request),
        launch_(*plan),
        plan_(*plan->plan),
        program_(*plan_.program),
        main_(main),
        lanes_(static_cast<uint32_t>(std::clamp(program_.pipeline, 1, static_cast<int>(kMaxLanes)))),
        at_(request, launch_, lanes_) {
    e_.team = team;
    e_.rank = member->rank;
    e_.key = request.key;
    e_.plan = std::move(plan);
    e_.record = team->options_.record && team->monitor_->Recorded(request.key);
    e_.lanes = lanes_;
    e_.bytes.assign(launch_.timed.size(), 0);
  }

  Status Run(const Team::Allocate& allocate) {
    JC_RETURN_IF_ERROR(Prepare(allocate));
    Status status = Fill();
    // Also after an error: what was enqueued uses the operands and the scratch memory, and `main` frees them.
    Status joined = Join();
    // Where `main` can't be made to wait, the memory is left alone: better lost with the broken device than reused too
    // soon.
    if (own_memory_ != nullptr && joined.ok())
      joined = api_.Cuda(api_.cudaFreeAsync(own_memory_, main_), "cudaFreeAsync");
    if (status.ok()) status = joined;
    if (status.ok()) status = api_.Cuda(api_.cudaEventRecord(e_.at(InFlight::kOver), main_), "cudaEventRecord");
    if (status.ok()) {
      team_.monitor_->Track(std::move(e_));
    } else {
      for (Event e : e_.events->events) (void)api_.cudaEventDestroy(e);  // pending ones must not be reused
    }
    return status;
  }

 private:
  // The bytes of edges that a call replaces; those of a flow are counted as they are handed over.
  void CountCalls() {
    for (size_t i = 0; i < launch_.timed.size(); ++i)
      if (launch_.timed[i].together) e_.bytes[i] = at_.EdgeBytes(launch_.timed[i].edge, launch_.timed[i].send);
  }

  Status Prepare(const Team::Allocate& allocate) {
    JC_RETURN_IF_ERROR(CheckFanIn());
    while (m_.streams.size() < launch_.num_streams) {
      Stream s = nullptr;
      JC_CUDA(api_, cudaStreamCreateWithFlags(&s, kNonBlockingStream));
      m_.streams.push_back(s);
    }
    used_.assign(launch_.num_streams, false);
    bool reduces = false;
    for (const Node& node : plan_.nodes) reduces = reduces || node.reduce;
    if (reduces || plan_.wide)
      JC_RETURN_IF_ERROR(team_.kernels_->Prepare(
          m_.device, r_.dtype, r_.reduce == Reduction::kNone ? Reduction::kSum : r_.reduce, &combine_));
    JC_RETURN_IF_ERROR(TakeEvents());
    e_.enqueued_ns = NowNs();
    size_t bytes = at_.bytes();
    Status status;
    if (bytes > 0 && allocate) {
      void* p = nullptr;
      status = allocate(bytes, &p);
      at_.Use(p);
    } else if (bytes > 0) {
      status = api_.Cuda(api_.cudaMallocAsync(&own_memory_, bytes, main_), "cudaMallocAsync");
      at_.Use(own_memory_);
    }
    if (!status.ok()) {
      team_.ReturnEvents(m_.rank, std::move(e_.events));  // none is pending
      return Status::Error(Format("%zu bytes of scratch memory: %s", bytes, status.message().c_str()));
    }
    return {};
  }

  Status CheckFanIn() const {
    if (plan_.max_fan_in < kMaxSources) return {};
    return Status::Error(Format(
        "program %s brings %u values to one vertex; the GPU's reduction takes %d in one pass. Choose a schedule with a "
        "smaller fan-in (JAXCOLL_SCHEDULE)",
        program_.name.c_str(), plan_.max_fan_in, kMaxSources - 1));
  }

  Status TakeEvents() {
    {
      std::lock_guard<std::mutex> lock(m_.events_mu);
      if (!m_.free_events.empty()) {
        e_.events = std::move(m_.free_events.back());
        m_.free_events.pop_back();
      }
    }
    if (e_.events == nullptr) e_.events = std::make_unique<EventSet>();
    while (e_.events->events.size() < e_.count()) {
      Event event = nullptr;
      Status s = api_.Cuda(api_.cudaEventCreateWithFlags(&event, kTimingEvent), "cudaEventCreateWithFlags");
      if (!s.ok()) {
        team_.ReturnEvents(m_.rank, std::move(e_.events));
        return s;
      }
      e_.events->events.push_back(event);
    }
    return {};
  }

  Status Fill() {
    if (e_.record) CountCalls();
    JC_CUDA(api_, cudaEventRecord(e_.at(InFlight::kBegin), main_));
    size_t steps = launch_.steps.size();
    for (size_t wave = 0; wave + 1 < steps + e_.lanes; ++wave) {
      if (!team_.options_.pairs) JC_RETURN_IF_ERROR(WaveInOneGroup(wave));
      for (uint32_t lane = 0; lane < e_.lanes && lane <= wave; ++lane) {
        if (wave - lane >= steps) continue;
        const LaunchStep& step = launch_.steps[wave - lane];
        for (const LaunchCall& c : step.calls) JC_RETURN_IF_ERROR(InsideHost(c, lane));
        if (team_.options_.pairs)
          for (const Flow& f : step.flows) JC_RETURN_IF_ERROR(FlowAlone(f, lane));
        for (const LocalNode& n : step.nodes) JC_RETURN_IF_ERROR(RunLocal(n, lane));
      }
    }
    for (const LocalNode& n : launch_.last)
      for (uint32_t lane = 0; lane < e_.lanes; ++lane) JC_RETURN_IF_ERROR(RunLocal(n, lane));
    return {};
  }

  Status Use(uint16_t stream) {
    if (used_[stream]) return {};
    used_[stream] = true;
    return api_.Cuda(api_.cudaStreamWaitEvent(m_.streams[stream], e_.at(InFlight::kBegin), 0), "cudaStreamWaitEvent");
  }

  Status Wait(const std::vector<uint32_t>& after, uint16_t stream, uint32_t lane) {
    JC_RETURN_IF_ERROR(Use(stream));
    for (uint32_t m : after) {
      if (!waited_.insert((uint64_t{stream} << 48) | (uint64_t{lane} << 32) | m).second) continue;
      JC_CUDA(api_, cudaStreamWaitEvent(m_.streams[stream], e_.at(e_.mark(lane, m)), 0));
    }
    return {};
  }

  Status Mark(uint32_t mark, uint16_t stream, uint32_t lane) {
    if (mark == kNoMark) return {};
    return api_.Cuda(api_.cudaEventRecord(e_.at(e_.mark(lane, mark)), m_.streams[stream]), "cudaEventRecord");
  }

  Status Before(uint32_t mark, uint16_t stream, uint32_t lane) {
    if (!e_.record) return {};
    return api_.Cuda(api_.cudaEventRecord(e_.at(e_.before(lane, mark)), m_.streams[stream]), "cudaEventRecord");
  }

  Status Begin(const Flow& f, uint32_t lane) {
    JC_RETURN_IF_ERROR(Wait(f.after, f.stream, lane));
    return Before(f.mark, f.stream, lane);
  }

  // A call of NCCL's own collective over the ranks of this host, in all its rows.
  Status InsideHost(const LaunchCall& c, uint32_t lane) {
    Status s = InsideHostUnnamed(c, lane);
    if (s.ok()) return s;
    return Status::Error(
        Format("step %d, %s, lane %u: %s", c.call.step, CallName(c.call).c_str(), lane, s.message().c_str()));
  }
  Status InsideHostUnnamed(const LaunchCall& c, uint32_t lane) {
    if (m_.inside == nullptr)
      return Status::Error(
          "the ranks of the host are not connected: a table must be connected on every rank before it "
          "comes into force");
    JC_RETURN_IF_ERROR(Wait(c.after, c.stream, lane));
    for (uint32_t copy : c.copies) JC_RETURN_IF_ERROR(Pieces(plan_.nodes[copy], lane, m_.streams[c.stream]));
    std::vector<size_t> rows;
    for (size_t row = 0; row < c.parts.size(); ++row)
      if (at_.Row(c, row, lane).block > 0) rows.push_back(row);
    for (size_t row : rows) JC_RETURN_IF_ERROR(Pack(c, row, lane));
    JC_RETURN_IF_ERROR(Before(c.mark, c.stream, lane));
    settle_ = false;
    if (rows.size() > 1) JC_RETURN_IF_ERROR(GroupStart());
    Status status;
    for (size_t row : rows)
      if (status.ok()) status = Collective(c, at_.Row(c, row, lane));
    if (grouped_) {
      Status ended = GroupEnd();
      if (status.ok()) status = ended;
    }
    JC_RETURN_IF_ERROR(status);
    if (settle_) JC_RETURN_IF_ERROR(team_.Settle(m_.inside, kNcclInProgress, "a collective inside the host"));
    JC_RETURN_IF_ERROR(Mark(c.mark, c.stream, lane));
    for (size_t row : rows) JC_RETURN_IF_ERROR(Unpack(c, row, lane));
    return Mark(c.done, c.stream, lane);
  }

  Status Collective(const LaunchCall& c, const RowPlace& p) {
    void* from = p.pack ? at_.memory() + p.pack_at : at_.Find(p.from, p.from_element);
    void* to = p.unpack ? at_.memory() + p.unpack_at : at_.Find(p.to, p.to_element);
    Stream stream = m_.streams[c.stream];
    int code = 0;
    if (c.call.reduce) {
      NcclReduction how;
      FindNcclReduction(r_.dtype, r_.reduce, &how);
      size_t count = p.block / at_.Wire(false) * static_cast<size_t>(how.per_element);
      code = api_.ncclReduceScatter(from, to, count, how.type, how.op, m_.inside, stream);
    } else {
      code = api_.ncclAllGather(from, to, p.block, kNcclBytes, m_.inside, stream);
    }
    if (code == kNcclInProgress) settle_ = true;
    return api_.Nccl(code, c.call.reduce ? "ncclReduceScatter" : "ncclAllGather");
  }

  Status Pack(const LaunchCall& c, size_t row, uint32_t lane) {
    const RowPlace& p = at_.Row(c, row, lane);
    if (!p.pack) return {};
    return ForEachShare(at_.Sources(c, row), p, at_.memory() + p.pack_at, lane,
                        [&](void* packed, void* value, size_t n) { return Copy(packed, value, n, c.stream); });
  }
  Status Unpack(const LaunchCall& c, size_t row, uint32_t lane) {
    const RowPlace& p = at_.Row(c, row, lane);
    if (!p.unpack) return {};
    return ForEachShare(at_.Sinks(c, row), p, at_.memory() + p.unpack_at, lane,
                        [&](void* packed, void* value, size_t n) { return Copy(value, packed, n, c.stream); });
  }

  // Calls f(where it lies packed, where it belongs, bytes) for every piece of all shares.
  template <typename F>
  Status ForEachShare(const std::vector<std::vector<Site>>& shares, const RowPlace& p, uint8_t* packed, uint32_t lane,
                      F&& f) {
    for (size_t i = 0; i < shares.size(); ++i) {
      uint8_t* at = packed + i * p.block;
      for (const Site& site : shares[i])
        JC_RETURN_IF_ERROR(at_.ForEachPiece(site.chunk, lane, [&](int64_t begin, int64_t n) -> Status {
          size_t bytes = static_cast<size_t>(n) * at_.Wire(site.wide);
          Status status = f(at, at_.Find(site, begin), bytes);
          at += bytes;
          return status;
        }));
    }
    return {};
  }

  Status Copy(void* to, const void* from, size_t bytes, uint16_t stream) {
    return api_.Cuda(api_.cudaMemcpyAsync(to, from, bytes, kDeviceToDevice, m_.streams[stream]), "cudaMemcpyAsync");
  }

  // The calls of a flow: one for each of its transfers and leaf. *calls counts them; without `comm` nothing else is
  // done.
  Status Transfers(const Flow& f, uint32_t lane, Comm comm, int peer, uint32_t* calls) {
    Stream stream = m_.streams[f.stream];
    for (uint32_t part : f.parts) {
      uint32_t chunk = f.send ? plan_.nodes[part].chunk : at_.ChunkOf(part);
      size_t wire = at_.Wire(f.send ? plan_.nodes[part].wide : plan_.incoming[part].wide);
      JC_RETURN_IF_ERROR(at_.ForEachPiece(chunk, lane, [&](int64_t begin, int64_t n) -> Status {
        ++*calls;
        if (comm == nullptr) return {};
        size_t bytes = static_cast<size_t>(n) * wire;
        e_.bytes[f.timed] += bytes;
        int code = f.send ? api_.ncclSend(at_.Locate(plan_.nodes[part].src, chunk, begin), bytes, kNcclBytes, peer,
                                          comm, stream)
                          : api_.ncclRecv(at_.Target(part, begin), bytes, kNcclBytes, peer, comm, stream);
        JC_RETURN_IF_ERROR(api_.Nccl(code, f.send ? "ncclSend" : "ncclRecv"));
        if (code == kNcclInProgress) settle_ = true;
        return {};
      }));
    }
    return {};
  }

  Status Where(const Status& s, const Flow& f, uint32_t lane) const {
    if (s.ok()) return s;
    const Edge& edge = program_.edges[f.edge];
    return Status::Error(Format("step %d, edge %d->%d of graph %u, lane %u: %s", edge.step, f.send ? m_.rank : f.peer,
                                f.send ? f.peer : m_.rank, edge.graph, lane, s.message().c_str()));
  }

  // Pairs: the flow has its communicator, so it needs a group only where it is several calls.
  Status FlowAlone(const Flow& f, uint32_t lane) { return Where(FlowAloneUnnamed(f, lane), f, lane); }
  Status FlowAloneUnnamed(const Flow& f, uint32_t lane) {
    JC_RETURN_IF_ERROR(Begin(f, lane));
    std::pair<int, int> key = f.send ? std::make_pair(m_.rank, int{f.peer}) : std::make_pair(int{f.peer}, m_.rank);
    auto it = m_.pairs.find(key);
    if (it == m_.pairs.end())
      return Status::Error(
          "the pair is not connected: a table must be connected on every rank before it comes into force");
    uint32_t calls = 0;
    JC_RETURN_IF_ERROR(Transfers(f, lane, nullptr, 0, &calls));
    settle_ = false;
    if (calls > 1) JC_RETURN_IF_ERROR(GroupStart());
    Status status = Transfers(f, lane, it->second, f.send ? 1 : 0, &calls);
    if (grouped_) {
      Status ended = GroupEnd();
      if (status.ok()) status = ended;
    }
    JC_RETURN_IF_ERROR(status);
    if (settle_) JC_RETURN_IF_ERROR(team_.Settle(it->second, kNcclInProgress, "a transfer"));
    return Mark(f.mark, f.stream, lane);
  }

  Status WaveInOneGroup(size_t wave) {
    std::vector<std::pair<const Flow*, uint32_t>> flows;
    for (uint32_t lane = 0; lane < e_.lanes && lane <= wave; ++lane)
      if (wave - lane < launch_.steps.size())
        for (const Flow& f : launch_.steps[wave - lane].flows) flows.emplace_back(&f, lane);
    if (flows.empty()) return {};
    uint32_t calls = 0;
    for (auto [f, lane] : flows) {
      JC_RETURN_IF_ERROR(Where(Begin(*f, lane), *f, lane));
      JC_RETURN_IF_ERROR(Transfers(*f, lane, nullptr, 0, &calls));
    }
    settle_ = false;
    if (calls > 0) JC_RETURN_IF_ERROR(Where(GroupStart(), *flows[0].first, flows[0].second));
    Status status;
    for (auto [f, lane] : flows) {
      status = Where(Transfers(*f, lane, m_.data, f->peer, &calls), *f, lane);
      if (!status.ok()) break;
    }
    if (grouped_) {
      Status ended = Where(GroupEnd(), *flows[0].first, flows[0].second);
      if (status.ok()) status = ended;
    }
    JC_RETURN_IF_ERROR(status);
    if (settle_)
      JC_RETURN_IF_ERROR(
          Where(team_.Settle(m_.data, kNcclInProgress, "a group of transfers"), *flows[0].first, flows[0].second));
    for (auto [f, lane] : flows) JC_RETURN_IF_ERROR(Mark(f->mark, f->stream, lane));
    return {};
  }

  Status GroupStart() {
    JC_NCCL(api_, ncclGroupStart());
    grouped_ = true;
    return {};
  }
  Status GroupEnd() {
    grouped_ = false;
    int code = api_.ncclGroupEnd();
    if (code == kNcclInProgress) settle_ = true;
    return api_.Nccl(code, "ncclGroupEnd");
  }

  Status RunLocal(const LocalNode& n, uint32_t lane) {
    const Node& node = plan_.nodes[n.node];
    JC_RETURN_IF_ERROR(Wait(n.after, n.stream, lane));
    Stream stream = m_.streams[n.stream];
    if (node.kind == NodeKind::kZero) {
      if (lane == 0) JC_RETURN_IF_ERROR(Zero(stream));
    } else {
      JC_RETURN_IF_ERROR(Pieces(node, lane, stream));
    }
    return Mark(n.mark, n.stream, lane);
  }

  Status Zero(Stream stream) {
    for (const View::Leaf& leaf : r_.output.leaves) {
      size_t bytes = static_cast<size_t>(leaf.count) * static_cast<size_t>(program_.output_blocks()) * at_.Wire(false);
      if (bytes > 0) JC_CUDA(api_, cudaMemsetAsync(leaf.base, 0, bytes, stream));
    }
    return {};
  }

  Status Pieces(const Node& node, uint32_t lane, Stream stream) {
    return at_.ForEachPiece(node.chunk, lane,
                            [&](int64_t begin, int64_t count) { return Piece(node, begin, count, stream); });
  }

  Status Piece(const Node& node, int64_t begin, int64_t count, Stream stream) {
    CombineArgs args;
    args.dst = at_.Locate(node.dst, node.chunk, begin);
    args.dst_wide = node.dst.wide ? 1 : 0;
    args.n = static_cast<uint64_t>(count);
    bool same = true;
    auto add = [&](const void* p, bool wide) {
      same = same && wide == node.dst.wide;
      args.Add(p, wide);
    };
    bool vertex = node.kind == NodeKind::kVertex;
    bool own = node.src.kind != SlotKind::kNone && (!vertex || node.reduce);
    for (uint32_t k = 0; vertex && k < node.num_in; ++k) {
      if (own && k == node.own_place) add(at_.Locate(node.src, node.chunk, begin), node.src.wide);
      add(at_.Landing(node.first_in + k, begin), plan_.incoming[node.first_in + k].wide);
    }
    if (own && (!vertex || node.own_place >= node.num_in)) add(at_.Locate(node.src, node.chunk, begin), node.src.wide);
    if (args.count == 1 && same) {
      size_t bytes = static_cast<size_t>(count) * at_.Wire(node.dst.wide);
      return api_.Cuda(api_.cudaMemcpyAsync(args.dst, args.src[0], bytes, kDeviceToDevice, stream), "cudaMemcpyAsync");
    }
    return team_.kernels_->Launch(combine_, args, stream);
  }

  // `main` goes on when all streams are through.
  Status Join() {
    Status status;
    for (size_t i = 0; i < used_.size(); ++i) {
      if (!used_[i]) continue;
      auto s = static_cast<uint16_t>(i);
      Status one = api_.Cuda(api_.cudaEventRecord(e_.at(e_.end(s)), m_.streams[s]), "cudaEventRecord");
      if (one.ok()) one = api_.Cuda(api_.cudaStreamWaitEvent(main_, e_.at(e_.end(s)), 0), "cudaStreamWaitEvent");
      if (status.ok()) status = std::move(one);
    }
    return status;
  }

  Team& team_;
  const Api& api_;
  Member& m_;
  const OpRequest& r_;
  const LaunchPlan& launch_;
  const Plan& plan_;
  const Program& program_;
  const Stream main_;
  const uint32_t lanes_;
  Placement at_;
  InFlight e_;
  void* own_memory_ = nullptr;
  Function combine_ = nullptr;
  std::vector<bool> used_;  // [stream]
  std::unordered_set<uint64_t> waited_;
  bool grouped_ = false, settle_ = false;
};

Status Team::Enqueue(const OpRequest& request, std::shared_ptr<const LaunchPlan> plan, Stream main,
                     const Allocate& allocate) {
  Member* m = member(request.rank);
  if (m == nullptr) return Status::Error(Format("rank %d of %s is not in this process", request.rank, name_.c_str()));
  if (std::string gone = lost(); !failed() && !gone.empty()) Fail(gone);
  if (failed()) return FailureStatus(request.rank);
  Status status;
  {
    std::lock_guard<std::mutex> lock(m->mu);
    if (failed()) return FailureStatus(request.rank);  // aborted meanwhile: its communicators are gone
    int before = -1;
    status = api_->Cuda(api_->cudaGetDevice(&before), "cudaGetDevice");
    if (status.ok() && before != m->device) status = api_->Cuda(api_->cudaSetDevice(m->device), "cudaSetDevice");
    if (status.ok()) status = Enqueuer(this, m, request, std::move(plan), main).Run(allocate);
    if (before >= 0 && before != m->device) {
      Status back = api_->Cuda(api_->cudaSetDevice(before), "cudaSetDevice");
      if (status.ok()) status = std::move(back);
    }
  }
  if (status.ok()) return status;
  std::string why =
      Format("%s (call %u, launch %lld) of rank %d in %s: %s", KindName(request.plan->program->kind),
             static_cast<unsigned>(request.key.site & 0xffffffffu), static_cast<long long>(request.key.launch),
             request.rank, name_.c_str(), status.message().c_str());
  Fail(why);
  // Another rank's failure may be what stopped this one: then that is the cause to report.
  return failure() == why ? Status::Error(std::move(why)) : FailureStatus(request.rank);
}

}  // namespace gpu
}  // namespace jaxcoll
