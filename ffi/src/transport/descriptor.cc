#include "transport/descriptor.h"

#include <pthread.h>
#include <unistd.h>

namespace jaxcoll {

// A plain list: the child of a process with threads may only do what a signal handler may. The lock is held during a
// fork, so that the child finds the list whole.
struct Descriptor::Known {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  Descriptor* first = nullptr;

  static Known& All() {
    static auto* all = new Known;  // outlives whatever the end of the process destroys
    static const int registered = pthread_atfork(Lock, Unlock, CloseInChild);
    (void)registered;
    return *all;
  }
  static void Lock() { pthread_mutex_lock(&All().mutex); }
  static void Unlock() { pthread_mutex_unlock(&All().mutex); }
  // Never shutdown(): that would end the parent's connection.
  static void CloseInChild() {
    for (Descriptor* d = All().first; d != nullptr; d = d->next_) {
      close(d->fd_);
      d->fd_ = -1;
    }
    Unlock();
  }
};

Descriptor::Descriptor(int fd) : fd_(fd) {
  Known::All();
  Known::Lock();
  Descriptor*& first = Known::All().first;
  next_ = first;
  link_ = &first;
  if (next_ != nullptr) next_->link_ = &next_;
  first = this;
  Known::Unlock();
}

Descriptor::~Descriptor() {
  Known::Lock();
  *link_ = next_;
  if (next_ != nullptr) next_->link_ = link_;
  Known::Unlock();
  if (fd_ >= 0) close(fd_);
}

}  // namespace jaxcoll
