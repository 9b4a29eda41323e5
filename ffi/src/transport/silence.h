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

#include <cstdint>

namespace jaxcoll {

inline constexpr const char* kSilent = "its host doesn't answer";

// Asks a host of which nothing has been heard for 10 s, and takes it for lost at 25 s.
inline void KeepAlive(int fd) {
  auto set = [&](int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof(value)); };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
}

// Bytes have been sent several times, with no answer of any kind since the first time, nor to the last one. A receiver
// without room acknowledges what it had room for, and answers the rest.
inline bool IsSilent(const tcp_info& info) {
  constexpr uint32_t kLongMs = 30000, kSeveralMs = 5000, kAnswerMs = 1000;
  return info.tcpi_unacked > 0 && info.tcpi_retransmits >= 3 && info.tcpi_last_ack_recv >= kLongMs &&
         info.tcpi_last_data_sent >= kAnswerMs && info.tcpi_last_ack_recv >= info.tcpi_last_data_sent + kSeveralMs;
}

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_SILENCE_H_
