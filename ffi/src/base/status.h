// Status: success, or a message for the user. Nothing in this library throws across an interface.
#ifndef JAXCOLL_BASE_STATUS_H_
#define JAXCOLL_BASE_STATUS_H_

#include <cstdarg>
#include <cstdio>
#include <string>
#include <utility>

namespace jaxcoll {

class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status Error(std::string message) {
    Status s;
    s.message_ = message.empty() ? "unknown error" : std::move(message);
    return s;
  }
  bool ok() const { return message_.empty(); }
  const std::string& message() const { return message_; }

 private:
  std::string message_;
};

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
inline std::string Format(const char* format, ...) {
  char stack[512];
  va_list args;
  va_start(args, format);
  va_list again;
  va_copy(again, args);
  int n = vsnprintf(stack, sizeof(stack), format, args);
  va_end(args);
  std::string out;
  if (n >= 0 && static_cast<size_t>(n) < sizeof(stack)) {
    out.assign(stack, static_cast<size_t>(n));
  } else if (n >= 0) {
    out.resize(static_cast<size_t>(n) + 1);
    vsnprintf(out.data(), out.size(), format, again);
    out.resize(static_cast<size_t>(n));
  }
  va_end(again);
  return out;
}

#define JC_RETURN_IF_ERROR(expr)             \
  do {                                       \
    ::jaxcoll::Status jc_status_ = (expr);   \
    if (!jc_status_.ok()) return jc_status_; \
  } while (0)

}  // namespace jaxcoll

#endif  // JAXCOLL_BASE_STATUS_H_
