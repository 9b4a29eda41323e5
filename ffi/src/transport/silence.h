// Whether the host at the other end of a TCP connection has stopped answering: it has no power, or no network.
//
// Where nothing is under way the kernel asks by itself (SO_KEEPALIVE), where something is it only sends again, for a
// quarter of an hour. TCP_USER_TIMEOUT would end that earlier, but also a connection to a process that is stopped and
// has a full receive buffer, although its host answers every probe (tcp_probe_timer; tried on Linux 6.18), and it takes
// the place of the keepalive's own limit.
#ifndef JAXCOLL_TRANSPORT_SILENCE_H_
#define JAXCOLL_TRANSPORT_SILENCE_H_

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>

namespace jaxcoll {

inline constexpr const char* kSilent = "its host doesn't answer";

// For how long a host may be silent: no shorter than a collective would wait, which an outage must not end before then.
inline int64_t SilenceMs(int64_t timeout_ns) { return std::max<int64_t>(30000, timeout_ns / 1000000); }

// Asks a host of which nothing has been heard for 10 s, and takes it for lost after `limit_ms`.
inline void KeepAlive(int fd, int64_t limit_ms) {
  constexpr int64_t kIdleS = 10, kCount = 4;
  auto set = [&](int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof(value)); };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kIdleS);
  set(IPPROTO_TCP, TCP_KEEPINTVL, static_cast<int>(std::min<int64_t>(32767, (limit_ms / 1000 - kIdleS) / kCount)));
  set(IPPROTO_TCP, TCP_KEEPCNT, kCount);
}

// Bytes have been sent several times, with no answer of any kind since the first time, nor to the last one. A receiver
// without room acknowledges what it had room for, and answers the rest.
inline bool IsSilent(const tcp_info& info, int64_t limit_ms) {
  constexpr uint32_t kSeveralMs = 5000, kAnswerMs = 1000;
  return info.tcpi_unacked > 0 && info.tcpi_retransmits >= 3 && info.tcpi_last_ack_recv >= limit_ms &&
         info.tcpi_last_data_sent >= kAnswerMs && info.tcpi_last_ack_recv >= info.tcpi_last_data_sent + kSeveralMs;
}

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_SILENCE_H_
