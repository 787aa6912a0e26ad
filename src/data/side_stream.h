/// Work on a stream beside the one in use.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace oxytorch::detail {

/// A stream from the device's pool. Of one thread at a time.
class SideStream {
 public:
  /// Errors: torch's, where the device has no streams of a pool.
  explicit SideStream(at::Device device)
      : guard_(device.type()), device_(device), side_(guard_.getStreamFromGlobalPool(device)) {}
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  /// Makes it the stream in use while it lives, for work that comes after all that the caller's stream holds.
  class Scope {
   public:
    explicit Scope(SideStream& of) : of_(of), before_(of.guard_.getStream(of.device_)) {
      of_.mark(before_).block(of_.side_);
      of_.guard_.exchangeStream(of_.side_);
    }
    ~Scope() { of_.guard_.exchangeStream(before_); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    SideStream& of_;
    c10::Stream before_;
  };

  /// An event behind all that the stream holds so far.
  [[nodiscard]] c10::Event mark(c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT) const {
    return mark(side_, flag);
  }
  /// Work that the stream in use gets from now on comes after the event.
  void follow(c10::Event& event) const { event.block(guard_.getStream(device_)); }
  /// Whether it is another stream than the one in use; some devices have one only.
  [[nodiscard]] bool is_beside() const { return guard_.getStream(device_) != side_; }

 private:
  [[nodiscard]] static c10::Event mark(const c10::Stream& stream,
                                       c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT) {
    c10::Event event(stream.device_type(), flag);
    event.record(stream);
    return event;
  }

  c10::impl::VirtualGuardImpl guard_;
  at::Device device_;
  c10::Stream side_;
};

}  // namespace oxytorch::detail
