#include "accelerator/float32_precision.h"

#include <algorithm>
#include <string>

#include "oxytorch/accelerator.h"

namespace oxytorch::accelerator {
namespace {

using Backend = Float32Backend;
using Op = Float32Op;
using Precision = Float32Precision;

/// Sets one value for the end of the scope.
class Parent {
 public:
  Parent(Backend backend, Precision before) : backend_(backend), before_(before) {}
  ~Parent() { set(before_); }
  Parent(const Parent&) = delete;
  Parent& operator=(const Parent&) = delete;
  void set(Precision value) { write_float32_precision(backend_, Op::ALL, value); }

 private:
  Backend backend_;
  Precision before_;
};

}  // namespace

std::optional<Precision> stored_precision(Backend backend, Op op) {
  // Nothing is above the generic setting: what is read is what is stored.
  Parent generic(Backend::GENERIC, float32_precision(Backend::GENERIC, Op::ALL));
  if (backend == Backend::GENERIC) return float32_precision(backend, op);
  generic.set(Precision::NONE);
  Parent whole(backend, float32_precision(backend, Op::ALL));
  if (op == Op::ALL) return float32_precision(backend, op);
  whole.set(Precision::NONE);
  const auto alone = float32_precision(backend, op);
  if (alone != Precision::TF32) return alone;
  whole.set(Precision::IEEE);
  if (float32_precision(backend, op) == Precision::IEEE) return std::nullopt;  // it gave way
  return alone;
}

HostSetting set_precision(Backend backend, const std::vector<Op>& ops, Precision value) {
  struct Stored {
    Op op;
    Precision value;
  };
  std::vector<Stored> before;
  bool unwritten = false;
  for (const Op op : ops) {
    const auto stored = stored_precision(backend, op);
    if (stored) {
      before.push_back({op, *stored});
    } else {
      unwritten = unwritten || float32_precision(backend, op) != value;
    }
  }
  if (unwritten) {
    // The parent would also reach the matrix products, which keep what they have.
    const auto products = float32_precision(backend, Op::MATMUL);
    before.insert(before.begin(), {{Op::ALL, *stored_precision(backend, Op::ALL)},
                                   {Op::MATMUL, *stored_precision(backend, Op::MATMUL)}});
    write_float32_precision(backend, Op::MATMUL, products == Precision::NONE ? Precision::IEEE : products);
    write_float32_precision(backend, Op::ALL, value);
  }
  for (const Stored& one : before) {
    if (std::find(ops.begin(), ops.end(), one.op) != ops.end()) write_float32_precision(backend, one.op, value);
  }
  return HostSetting::applied("float32_precision", "float32 products are rounded as asked for.", "", [backend, before] {
    for (const Stored& one : before) write_float32_precision(backend, one.op, one.value);
  });
}

HostSetting set_float32_precision(const std::string& backend, const std::vector<std::string>& operations,
                                  const std::string& value) {
  std::vector<Op> ops;
  for (const auto& operation : operations) ops.push_back(str2op(operation));
  return set_precision(str2backend(backend), ops, str2precision(value));
}

}  // namespace oxytorch::accelerator
