#include "oxytorch/memory/parked.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "base/whole_file.h"

namespace oxytorch::memory {
namespace {

// Files in use: their first bytes in memory, and how many.
struct Files {
  std::mutex mutex;
  std::map<const char*, std::size_t> all;
};
Files& files() {
  static auto* const made = new Files;  // outlives tensors of other static objects
  return *made;
}

// The file that a tensor's memory is, and its size; null where it is none.
std::pair<char*, std::size_t> file_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) return {};
  const auto* const memory = static_cast<const char*>(tensor.storage().data());
  auto& known = files();
  const std::lock_guard lock(known.mutex);
  const auto found = known.all.find(memory);
  if (memory == nullptr || found == known.all.end()) return {};
  return {const_cast<char*>(found->first), found->second};
}

bool may_be_parked(const at::Tensor& tensor) {
  const bool plain = tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu() &&
                     tensor.has_storage() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg();
  return plain && tensor.nbytes() >= kParkedBytes;
}

// A file of that size without a name, with what `content` holds where it is given, in memory; null where it cannot be.
char* mapped(const std::string& folder, std::size_t size, const char* content) {
  auto path = folder + "/oxytorch-parked-XXXXXX";
  const int file = mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) return nullptr;
  unlink(path.c_str());
  void* memory = MAP_FAILED;
  // Writing to a mapping cannot fail for want of space then.
  const bool has_space = posix_fallocate(file, 0, static_cast<off_t>(size)) == 0;
  if (has_space && (content == nullptr || write_all(file, content, size) == 0)) {
    memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

// A copy in a file; undefined where none of the folders can hold it.
at::Tensor in_file(const at::Tensor& tensor, const std::vector<std::string>& folders) {
  const auto size = tensor.nbytes();
  const bool dense = tensor.is_contiguous();
  const auto* const content = dense ? static_cast<const char*>(tensor.const_data_ptr()) : nullptr;
  const auto like = at::empty_like(tensor, tensor.options().device(at::kMeta));  // the layout that a clone has
  for (const auto& folder : folders) {
    auto* const memory = mapped(folder, size, content);
    if (memory == nullptr) continue;
    {
      auto& known = files();
      const std::lock_guard lock(known.mutex);
      known.all.emplace(memory, size);
    }
    const auto end = [size](void* at) {
      auto& known = files();
      {
        const std::lock_guard lock(known.mutex);
        known.all.erase(static_cast<const char*>(at));
      }
      munmap(at, size);
    };
    auto made = at::from_blob(memory, like.sizes(), like.strides(), end, tensor.options());
    if (!dense) {
      made.copy_(tensor);
      rest(made);
    }
    return made;
  }
  return {};
}

}  // namespace

std::vector<std::string> parking_folders() {
  const char* const named = std::getenv("TMPDIR");
  return {"/var/tmp", named != nullptr && *named != '\0' ? named : "/tmp"};
}

at::Tensor park(const at::Tensor& tensor, const std::vector<std::string>& folders) {
  const auto given = tensor.detach();
  if (!may_be_parked(given)) return given.clone();
  auto made = in_file(given, folders);
  return made.defined() ? made : given.clone();
}

bool is_parked(const at::Tensor& tensor) { return file_of(tensor).first != nullptr; }

bool move_to_file(at::Tensor& tensor) {
  if (!may_be_parked(tensor) || is_parked(tensor)) return false;
  auto made = in_file(tensor.detach(), parking_folders());
  if (made.defined()) tensor.set_data(made);
  return made.defined();
}

bool move_to_memory(at::Tensor& tensor) {
  if (!is_parked(tensor)) return false;
  tensor.set_data(tensor.detach().clone());
  return true;
}

void rest(const at::Tensor& tensor) {
  if (const auto [memory, size] = file_of(tensor); memory != nullptr) madvise(memory, size, MADV_DONTNEED);
}

void rest_all() {
  auto& known = files();
  const std::lock_guard lock(known.mutex);
  for (const auto& [memory, size] : known.all) madvise(const_cast<char*>(memory), size, MADV_DONTNEED);
}

void read_ahead(const at::Tensor& tensor) {
  if (const auto [memory, size] = file_of(tensor); memory != nullptr) madvise(memory, size, MADV_WILLNEED);
}

}  // namespace oxytorch::memory
