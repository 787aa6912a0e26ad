#include "value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

#include "base/spelling.h"

namespace oxytorch::environment {

bool is_name(std::string_view text) {
  const auto fits = [](char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  };
  return !text.empty() && (text[0] < '0' || text[0] > '9') && std::all_of(text.begin(), text.end(), fits);
}

bool one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

std::vector<std::string_view> split(std::string_view text, char by) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(by);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::optional<long long> whole(std::string_view text) {
  text = trim(text);
  bool negative = false;
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) {
    negative = text[0] == '-';
    text.remove_prefix(1);
  }
  int base = 10;
  if (text.size() > 2 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) {
    base = 16;
    text.remove_prefix(2);
  }
  unsigned long long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error == std::errc::result_out_of_range && end == text.data() + text.size()) {
    return negative ? std::numeric_limits<long long>::min() : std::numeric_limits<long long>::max();
  }
  if (error != std::errc() || text.empty() || end != text.data() + text.size()) return std::nullopt;
  const auto most = static_cast<unsigned long long>(std::numeric_limits<long long>::max());
  const auto kept = static_cast<long long>(std::min(value, most));
  return negative ? -kept : kept;
}

std::optional<double> real(std::string_view text) {
  text = trim(text);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || text.empty() || end != text.data() + text.size() || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

bool is_on(std::string_view value) {
  const std::string word = lower(trim(value));
  for (const char* off : {"", "0", "false", "no", "off", "n", "f"}) {
    if (word == off) return false;
  }
  return true;
}

std::vector<std::pair<std::string, std::string>> pairs_of(std::string_view text, char by, char sign) {
  std::vector<std::pair<std::string, std::string>> pairs;
  int depth = 0;
  std::size_t from = 0;
  for (std::size_t at = 0; at <= text.size(); ++at) {
    const char c = at < text.size() ? text[at] : by;
    if (c == '[') ++depth;
    if (c == ']' && depth > 0) --depth;
    if (at < text.size() && (c != by || depth > 0)) continue;
    const std::string_view part = trim(text.substr(from, at - from));
    from = at + 1;
    if (part.empty()) continue;
    const std::size_t equals = part.find(sign);
    if (equals == std::string_view::npos) {
      pairs.emplace_back(part, "");
    } else {
      pairs.emplace_back(trim(part.substr(0, equals)), trim(part.substr(equals + 1)));
    }
  }
  return pairs;
}

int compare_versions(std::string_view a, std::string_view b) {
  const auto next = [](std::string_view& text) -> long {
    long value = 0;
    std::size_t used = 0;
    while (used < text.size() && used < 9 && text[used] >= '0' && text[used] <= '9') {
      value = value * 10 + (text[used++] - '0');
    }
    text.remove_prefix(used);
    if (used == 0 || text.empty() || text[0] != '.') {
      text = {};
    } else {
      text.remove_prefix(1);
    }
    return value;
  };
  while (!a.empty() || !b.empty()) {
    const long left = next(a);
    const long right = next(b);
    if (left != right) return left < right ? -1 : 1;
  }
  return 0;
}

namespace {

bool is_flag(const Setting& setting, std::string_view value) {
  // The bridge knows four words and stops at any other.
  if (setting.component == "gaudi") return one_of(lower(value), {"0", "1", "true", "false"});
  return one_of(lower(value), {"0", "1", "true", "false", "yes", "no", "on", "off", "y", "n", "t", "f"});
}

bool power_of_two(long long value) { return value > 0 && (value & (value - 1)) == 0; }

// ---- PYTORCH_ALLOC_CONF ---------------------------------------------------------------------------------------

struct Key {
  const char* name;
  std::string (*fault)(std::string_view);
};

std::string torch_flag(std::string_view value) {
  return one_of(value, {"True", "False"}) ? "" : "must be True or False";
}

template <long long low>
std::string at_least(std::string_view value) {
  const auto number = whole(value);
  return number && *number >= low ? "" : "must be a whole number from " + std::to_string(low);
}

/// A power of two from 1 (or 0 for off) to 64, or a list of interval:divisions.
std::string roundup_fault(std::string_view value) {
  const auto divisions = [](std::string_view text) {
    const auto number = whole(text);
    return number && (*number == 0 || (power_of_two(*number) && *number <= 64));
  };
  if (value.empty() || value.front() != '[') return divisions(value) ? "" : "must be 0 or a power of two up to 64";
  if (value.back() != ']') return "has no closing bracket";
  for (const std::string_view part : split(value.substr(1, value.size() - 2), ',')) {
    const auto sides = split(trim(part), ':');
    const bool last = sides[0] == ">";
    const auto size = whole(sides[0]);
    if (sides.size() != 2 || !(last || (size && power_of_two(*size))) || !divisions(sides[1])) {
      return "must list megabytes:divisions, both powers of two, as in [256:1,512:2,>:4]";
    }
  }
  return "";
}

template <bool closed>
std::string share_fault(std::string_view value) {
  const auto number = real(value);
  if (number && *number > 0 && (closed ? *number <= 1 : *number < 1)) return "";
  return closed ? "must be above 0 and at most 1" : "must be between 0 and 1";
}

std::string backend_fault(std::string_view value) {
  return one_of(value, {"native", "cudaMallocAsync", "hipMallocAsync"}) ? "" : "must be native or cudaMallocAsync";
}

std::string register_threads_fault(std::string_view value) {
  const auto number = whole(value);
  return number && power_of_two(*number) && *number <= 128 ? "" : "must be a power of two up to 128";
}

constexpr Key kTorchKeys[] = {
    {"backend", backend_fault},
    {"max_split_size_mb", at_least<20>},
    {"max_non_split_rounding_mb", at_least<20>},
    {"large_segment_size_mb", at_least<1>},
    {"garbage_collection_threshold", share_fault<false>},
    {"roundup_power2_divisions", roundup_fault},
    {"expandable_segments", torch_flag},
    {"release_lock_on_cudamalloc", torch_flag},
    {"release_lock_on_hipmalloc", torch_flag},
    {"pinned_use_cuda_host_register", torch_flag},
    {"pinned_use_hip_host_register", torch_flag},
    {"pinned_num_register_threads", register_threads_fault},
    {"pinned_use_background_threads", torch_flag},
    {"pinned_reserve_segment_size_mb", at_least<0>},
    {"pinned_max_round_threshold_mb", at_least<0>},
    {"pinned_max_cached_size_mb", at_least<0>},
    {"pinned_free_catch_all", torch_flag},
    {"graph_capture_record_stream_reuse", torch_flag},
    {"per_process_memory_fraction", share_fault<true>},
    {"throw_on_cudamalloc_oom", torch_flag},
};

template <std::size_t n>
std::string key_fault(const Key (&keys)[n], const std::string& key, std::string_view value) {
  const auto* found = std::find_if(std::begin(keys), std::end(keys), [&](const Key& one) { return key == one.name; });
  if (found == std::end(keys)) {
    std::vector<std::string> names;
    for (const Key& one : keys) names.emplace_back(one.name);
    const std::string near = nearest(key, names);
    return "has an unknown setting " + in_quotes(key) + (near.empty() ? "" : "; did you mean " + in_quotes(near) + "?");
  }
  const std::string fault = found->fault(value);
  return fault.empty() ? "" : "sets " + key + " to " + in_quotes(value) + ", which " + fault;
}

std::string cuda_alloc_fault(std::string_view value) {
  for (const auto& [key, text] : pairs_of(value, ',', ':')) {
    if (std::string fault = key_fault(kTorchKeys, key, text); !fault.empty()) return fault;
  }
  return "";
}

// ---- MALLOC_CONF ----------------------------------------------------------------------------------------------

std::string je_flag(std::string_view value) { return one_of(value, {"true", "false"}) ? "" : "must be true or false"; }
std::string je_number(std::string_view value) { return whole(value) ? "" : "must be a whole number"; }
std::string je_real(std::string_view value) { return real(value) ? "" : "must be a number"; }
std::string je_any(std::string_view) { return ""; }
std::string je_decay(std::string_view value) {
  const auto number = whole(value);
  return number && *number >= -1 ? "" : "must be milliseconds, or -1 for never";
}
std::string je_thp(std::string_view value) {
  return one_of(value, {"default", "always", "never"}) ? "" : "must be default, always or never";
}
std::string je_metadata_thp(std::string_view value) {
  return one_of(value, {"disabled", "auto", "always"}) ? "" : "must be disabled, auto or always";
}
std::string je_per_cpu(std::string_view value) {
  return one_of(value, {"disabled", "percpu", "phycpu"}) ? "" : "must be disabled, percpu or phycpu";
}
std::string je_dss(std::string_view value) {
  return one_of(value, {"disabled", "primary", "secondary"}) ? "" : "must be disabled, primary or secondary";
}
std::string je_narenas(std::string_view value) {
  const auto number = whole(value);
  return value == "default" || (number && *number >= 1) ? "" : "must be a whole number from 1, or default";
}
std::string je_junk(std::string_view value) {
  return one_of(value, {"true", "false", "alloc", "free"}) ? "" : "must be true, false, alloc or free";
}

constexpr Key kJemallocKeys[] = {
    {"abort", je_flag},
    {"abort_conf", je_flag},
    {"background_thread", je_flag},
    {"bin_shards", je_any},
    {"cache_oblivious", je_flag},
    {"confirm_conf", je_flag},
    {"dirty_decay_ms", je_decay},
    {"dss", je_dss},
    {"hpa", je_flag},
    {"hpa_dirty_mult", je_any},
    {"hpa_hugification_threshold_ratio", je_real},
    {"hpa_hugify_delay_ms", je_number},
    {"hpa_min_purge_interval_ms", je_number},
    {"hpa_sec_batch_fill_extra", je_number},
    {"hpa_sec_bytes_after_flush", je_number},
    {"hpa_sec_max_alloc", je_number},
    {"hpa_sec_max_bytes", je_number},
    {"hpa_sec_nshards", je_number},
    {"hpa_slab_max_alloc", je_number},
    {"junk", je_junk},
    {"lg_extent_max_active_fit", je_number},
    {"lg_prof_interval", je_number},
    {"lg_prof_sample", je_number},
    {"lg_san_uaf_align", je_number},
    {"lg_tcache_flush_large_div", je_number},
    {"lg_tcache_flush_small_div", je_number},
    {"lg_tcache_max", je_number},
    {"lg_tcache_nslots_mul", je_number},
    {"log", je_any},
    {"max_background_threads", je_number},
    {"metadata_thp", je_metadata_thp},
    {"mutex_max_spin", je_number},
    {"muzzy_decay_ms", je_decay},
    {"narenas", je_narenas},
    {"narenas_ratio", je_real},
    {"oversize_threshold", je_number},
    {"percpu_arena", je_per_cpu},
    {"prof", je_flag},
    {"prof_accum", je_flag},
    {"prof_active", je_flag},
    {"prof_final", je_flag},
    {"prof_gdump", je_flag},
    {"prof_leak", je_flag},
    {"prof_leak_error", je_flag},
    {"prof_log", je_flag},
    {"prof_prefix", je_any},
    {"prof_recent_alloc_max", je_number},
    {"prof_stats", je_flag},
    {"prof_sys_thread_name", je_flag},
    {"prof_thread_active_init", je_flag},
    {"prof_time_resolution", je_any},
    {"prof_unbias", je_flag},
    {"retain", je_flag},
    {"san_guard_large", je_number},
    {"san_guard_small", je_number},
    {"slab_sizes", je_any},
    {"stats_interval", je_number},
    {"stats_interval_opts", je_any},
    {"stats_print", je_flag},
    {"stats_print_opts", je_any},
    {"tcache", je_flag},
    {"tcache_gc_delay_bytes", je_number},
    {"tcache_gc_incr_bytes", je_number},
    {"tcache_max", je_number},
    {"tcache_nslots_large", je_number},
    {"tcache_nslots_small_max", je_number},
    {"tcache_nslots_small_min", je_number},
    {"thp", je_thp},
    {"trust_madvise", je_flag},
    {"utrace", je_flag},
    {"xmalloc", je_flag},
    {"zero", je_flag},
    {"zero_realloc", je_any},
};

std::string malloc_conf_fault(std::string_view value) {
  for (const auto& [key, text] : pairs_of(value, ',', ':')) {
    if (std::string fault = key_fault(kJemallocKeys, key, text); !fault.empty()) return fault;
  }
  return "";
}

// ---- GLIBC_TUNABLES -------------------------------------------------------------------------------------------

struct Tunable {
  const char* name;
  long long low;
  long long high;
};
constexpr long long kMost = std::numeric_limits<long long>::max();
constexpr Tunable kTunables[] = {
    {"glibc.malloc.check", 0, 3},
    {"glibc.malloc.top_pad", 0, kMost},
    {"glibc.malloc.perturb", 0, 255},
    {"glibc.malloc.mmap_max", 0, 2147483647},
    {"glibc.malloc.mmap_threshold", 0, kMost},
    {"glibc.malloc.trim_threshold", 0, kMost},
    {"glibc.malloc.arena_max", 1, kMost},
    {"glibc.malloc.arena_test", 1, kMost},
    {"glibc.malloc.tcache_max", 0, kMost},
    {"glibc.malloc.tcache_count", 0, kMost},
    {"glibc.malloc.tcache_unsorted_limit", 0, kMost},
    {"glibc.malloc.mxfast", 0, kMost},
    {"glibc.malloc.hugetlb", 0, kMost},
    {"glibc.rtld.nns", 1, 16},
    {"glibc.rtld.optional_static_tls", 0, kMost},
    {"glibc.rtld.dynamic_sort", 1, 2},
    {"glibc.pthread.mutex_spin_count", 0, 32767},
    {"glibc.pthread.stack_cache_size", 0, kMost},
    {"glibc.pthread.rseq", 0, 1},
    {"glibc.pthread.stack_hugetlb", 0, 1},
    {"glibc.elision.enable", 0, 1},
    {"glibc.mem.tagging", 0, 255},
};

std::string glibc_fault(std::string_view value) {
  for (const auto& [key, text] : pairs_of(value, ':', '=')) {
    const auto* found = std::ranges::find(kTunables, std::string_view(key), &Tunable::name);
    if (found == std::end(kTunables)) {
      // Tunables of processors differ from machine to machine.
      if (key.starts_with("glibc.cpu.") || key.starts_with("glibc.elision.") || key.starts_with("glibc.gmon."))
        continue;
      std::vector<std::string> names;
      for (const Tunable& one : kTunables) names.emplace_back(one.name);
      const std::string near = nearest(key, names);
      return "names an unknown tunable " + in_quotes(key) +
             (near.empty() ? "" : "; did you mean " + in_quotes(near) + "?");
    }
    const auto number = whole(text);
    if (!number || *number < found->low || *number > found->high) {
      return "sets " + key + " to " + in_quotes(text) + ", which must be a whole number from " +
             std::to_string(found->low) + (found->high == kMost ? "" : " to " + std::to_string(found->high));
    }
  }
  return "";
}

// ---- OpenMP ---------------------------------------------------------------------------------------------------

/// Numbers, ranges and ranges with a step, separated by commas or spaces.
std::string cpu_affinity_fault(std::string_view value) {
  std::string spaced(value);
  std::replace(spaced.begin(), spaced.end(), ',', ' ');
  bool any = false;
  for (const std::string_view part : split(spaced, ' ')) {
    if (trim(part).empty()) continue;
    any = true;
    const auto step = split(trim(part), ':');
    const auto ends = split(step[0], '-');
    const auto from = whole(ends[0]);
    const auto to = ends.size() > 1 ? whole(ends[1]) : from;
    const auto by = step.size() > 1 ? whole(step[1]) : std::optional<long long>(1);
    if (step.size() > 2 || ends.size() > 2 || !from || !to || !by || *from < 0 || *to < *from || *by < 1) {
      return "holds " + in_quotes(part) + ", which is neither a processor nor a range such as 0-3 or 0-15:2";
    }
  }
  return any ? "" : "names no processor";
}

/// threads(4), cores, {0,1},{2:2}:4:2, !{3} ... ; numbers are checked, what they name is the machine's matter.
std::string places_fault(std::string_view value) {
  const std::string text = lower(trim(value));
  const std::string_view word = std::string_view(text).substr(0, text.find('('));
  if (one_of(word, {"threads", "cores", "sockets", "ll_caches", "numa_domains"})) {
    if (word.size() == text.size()) return "";
    const auto count = whole(std::string_view(text).substr(word.size() + 1, text.size() - word.size() - 2));
    return text.back() == ')' && count && *count >= 1 ? "" : "has a count that is not a whole number from 1";
  }
  bool open = false;
  bool any = false;
  for (const char c : text) {
    if (c == '{') {
      if (open) return "opens a brace inside another";
      open = any = true;
    } else if (c == '}') {
      if (!open) return "closes a brace that is not open";
      open = false;
    } else if (!(c >= '0' && c <= '9') && !one_of(std::string_view(&c, 1), {",", ":", "-", "!", " "})) {
      return "has " + in_quotes(std::string_view(&c, 1)) + ", which is no part of a list of places";
    } else if (c >= '0' && c <= '9') {
      any = true;
    }
  }
  if (open) return "leaves a brace open";
  return any ? "" : "names no place";
}

std::string each_of(std::string_view value, const std::function<bool(std::string_view)>& good, const char* fault) {
  for (const std::string_view part : split(value, ',')) {
    if (!good(trim(part))) return std::string("has ") + in_quotes(trim(part)) + ", which " + fault;
  }
  return "";
}

std::string thread_counts_fault(std::string_view value) {
  return each_of(
      value,
      [](std::string_view part) {
        const auto number = whole(part);
        return number && *number >= 1;
      },
      "is not a whole number from 1");
}

std::string proc_bind_fault(std::string_view value) {
  const std::string text = lower(trim(value));
  if (one_of(text, {"true", "false"})) return "";
  return each_of(
      text, [](std::string_view part) { return one_of(part, {"primary", "master", "close", "spread"}); },
      "is none of true, false, primary, close and spread");
}

std::string schedule_fault(std::string_view value) {
  std::string text = lower(trim(value));
  for (const std::string_view modifier : {"monotonic:", "nonmonotonic:"}) {
    if (text.starts_with(modifier)) text.erase(0, modifier.size());
  }
  const auto parts = split(text, ',');
  if (!one_of(trim(parts[0]), {"static", "dynamic", "guided", "auto"}))
    return "is none of static, dynamic, guided and auto";
  if (parts.size() == 1) return "";
  const auto chunk = whole(parts[1]);
  return parts.size() == 2 && chunk && *chunk >= 1 ? "" : "has a chunk that is not a whole number from 1";
}

/// A number with one of the letters of `units`, any case.
bool with_unit(std::string_view value, std::string_view units) {
  value = trim(value);
  if (!value.empty() && units.find(lower(value.substr(value.size() - 1))) != std::string_view::npos) {
    value.remove_suffix(1);
  }
  const auto number = whole(value);
  return number && *number >= 0;
}

// ---- CUDA and Gaudi -------------------------------------------------------------------------------------------

std::string cuda_devices_fault(std::string_view value) {
  if (trim(value).empty() || lower(trim(value)) == "nodevfiles") return "";
  std::vector<std::string_view> seen;
  for (std::string_view part : split(value, ',')) {
    part = trim(part);
    const auto number = whole(part);
    const bool named = part.starts_with("GPU-") || part.starts_with("MIG-");
    if (!number && !named)
      return "has " + in_quotes(part) +
             ", which is neither a card's number nor a UUID; CUDA sees no card from there on";
    if (number && *number < 0) return "";  // the usual way to end the list
    if (std::find(seen.begin(), seen.end(), part) != seen.end()) {
      return "names card " + in_quotes(part) + " twice, and CUDA then sees none";
    }
    seen.push_back(part);
  }
  return "";
}

std::string cublas_workspace_fault(std::string_view value) {
  const auto parts = split(value, ':');
  bool good = parts.size() >= 3 && parts.size() % 2 == 1 && parts[0].empty();
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto number = whole(parts[i]);
    good = good && number && *number >= 0;
  }
  return good ? "" : "is not of the form :KiB:count, such as :4096:8";
}

std::string level_fault(std::string_view value) {
  if (one_of(value, {"LOC", "NVL", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "C2C", "PORT"}) || whole(value)) return "";
  return "is none of LOC, NVL, PIX, PXB, PHB and SYS";
}

std::string recipe_cache_fault(std::string_view value) {
  const auto parts = split(value, ',');
  const auto flag = [](std::string_view part) { return one_of(lower(trim(part)), {"", "0", "1", "true", "false"}); };
  if (parts.size() > 4) return "has more than the four parts path,delete,megabytes,nfs";
  if (parts.size() > 1 && !flag(parts[1]))
    return "has " + in_quotes(parts[1]) + " for delete, which must be true or false";
  if (parts.size() > 2 && !trim(parts[2]).empty()) {
    const auto size = whole(parts[2]);
    if (!size || *size < 0) return "has " + in_quotes(parts[2]) + " for megabytes, which must be a whole number";
  }
  if (parts.size() > 3 && !flag(parts[3]))
    return "has " + in_quotes(parts[3]) + " for nfs, which must be true or false";
  return "";
}

std::string torch_logs_fault(std::string_view value) {
  return each_of(
      value,
      [](std::string_view part) {
        if (!part.empty() && (part[0] == '+' || part[0] == '-')) part.remove_prefix(1);
        return std::all_of(part.begin(), part.end(), [](char c) {
          return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' ||
                 c == ':';
        });
      },
      "is no name of a log");
}

std::string stack_size_fault(std::string_view value) {
  return with_unit(value, "bkmg") ? "" : "is not a size in KiB or with B, K, M or G";
}

std::string spin_count_fault(std::string_view value) {
  const bool fits = one_of(lower(value), {"infinite", "infinity"}) || with_unit(value, "kmgt");
  return fits ? "" : "is not a whole number or infinite";
}

constexpr char kManySettings[] = "settings of its own, see what it does";

constexpr Grammar kGrammars[] = {
    {"cpu_affinity", "processor numbers, ranges such as 0-3, and steps such as 0-15:2", cpu_affinity_fault},
    {"cublas_workspace", ":KiB:count, such as :4096:8", cublas_workspace_fault},
    {"cuda_alloc", kManySettings, cuda_alloc_fault},
    {"cuda_devices", "card numbers or UUIDs, separated by commas", cuda_devices_fault},
    {"glibc_tunables", kManySettings, glibc_fault},
    {"level", "'LOC', 'NVL', 'PIX', 'PXB', 'PHB' or 'SYS'", level_fault},
    {"malloc_conf", kManySettings, malloc_conf_fault},
    {"places", "'threads', 'cores', 'sockets', 'll_caches' or 'numa_domains', or lists such as {0:4}", places_fault},
    {"proc_bind", "'false', 'true', or 'primary', 'close' or 'spread' for each level", proc_bind_fault},
    {"recipe_cache", "path,delete,megabytes,nfs such as /tmp/recipes,false,1024,false", recipe_cache_fault},
    {"schedule", "'static', 'dynamic', 'guided' or 'auto', with a chunk after a comma", schedule_fault},
    {"spin_count", "a whole number with k, M, G or T, or 'infinite'", spin_count_fault},
    {"stack_size", "a size in KiB, or with B, K, M or G", stack_size_fault},
    {"thread_counts", "whole numbers from 1, separated by commas", thread_counts_fault},
    {"torch_logs", kManySettings, torch_logs_fault},
};

}  // namespace

const Grammar* find_grammar(std::string_view name) {
  const auto* found = std::find_if(std::begin(kGrammars), std::end(kGrammars),
                                   [&](const Grammar& grammar) { return grammar.name == name; });
  return found == std::end(kGrammars) ? nullptr : found;
}

std::vector<std::string> grammar_names() {
  std::vector<std::string> names;
  for (const Grammar& grammar : kGrammars) names.emplace_back(grammar.name);
  return names;
}

std::string fault_of(const Setting& setting, std::string_view value) {
  // An empty value is what most components take for unset.
  if (trim(value).empty()) return "";
  if (const Grammar* grammar = find_grammar(setting.grammar)) return grammar->fault(value);
  const std::string must = "must be " + setting.allowed();
  switch (setting.kind) {
    case Kind::Flag: return is_flag(setting, trim(value)) ? "" : must;
    case Kind::Digit: return one_of(trim(value), {"0", "1"}) ? "" : must;
    case Kind::Integer: {
      const auto number = whole(value);
      if (!number) return must;
      return (setting.low && *number < *setting.low) || (setting.high && *number > *setting.high) ? must : "";
    }
    case Kind::Number: {
      const auto number = real(value);
      if (!number) return must;
      const bool below = setting.low && *number < static_cast<double>(*setting.low);
      const bool above = setting.high && *number > static_cast<double>(*setting.high);
      return below || above ? must : "";
    }
    case Kind::Size: return with_unit(value, "kmgt") ? "" : must;
    case Kind::Choice: {
      for (const std::string& choice : setting.choices) {
        if (setting.any_case ? lower(choice) == lower(trim(value)) : choice == trim(value)) return "";
      }
      const std::string near = value.size() < 3 ? "" : nearest(value, setting.choices);
      return must + (near.empty() ? "" : "; did you mean " + in_quotes(near) + "?");
    }
    case Kind::List:
    case Kind::Path:
    case Kind::Text:
    case Kind::Grammar: break;
  }
  return "";
}

}  // namespace oxytorch::environment
