// Descriptors that a process doesn't leave to its forked children: a connection ends, for the peer, when the last one
// that holds it has closed it, and a child that outlives its parent would hide that the parent is gone.
#ifndef JAXCOLL_TRANSPORT_DESCRIPTOR_H_
#define JAXCOLL_TRANSPORT_DESCRIPTOR_H_

namespace jaxcoll {

// Owns a descriptor. In a forked child it is closed, and then -1: its number may soon be that of something else.
class Descriptor {
 public:
  explicit Descriptor(int fd);
  ~Descriptor();
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const { return fd_; }  // NOLINT(google-explicit-constructor): for system calls

 private:
  struct Known;
  int fd_;
  Descriptor* next_ = nullptr;  // of all that there are
  Descriptor** link_ = nullptr;
};

}  // namespace jaxcoll

#endif  // JAXCOLL_TRANSPORT_DESCRIPTOR_H_
