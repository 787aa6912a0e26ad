// oxytorch_fuzz TARGET [libFuzzer's options and folders of inputs]
// oxytorch_fuzz targets                prints their names
// oxytorch_fuzz seeds FOLDER           writes the first inputs of the targets that no test leaves any of
//
// What may come of any input is an Error other than Internal, or a result that is read to its end; all else ends the
// program, and libFuzzer keeps the input. tools/fuzz.sh builds and runs it.
#define XXH_INLINE_ALL
#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/disk_tier.h"
#include "data/file.h"
#include "data/image_listing.h"
#include "data/loader_state.h"
#include "data/sample_entry.h"
#include "file_set.h"
#include "image_cases.h"
#include "oxytorch/backend/sim.h"
#include "oxytorch/config.h"
#include "oxytorch/data/dataset.h"
#include "oxytorch/error.h"
#include "oxytorch/tune/certificate.h"
#include "oxytorch/units.h"

extern "C" int LLVMFuzzerRunDriver(int* argc, char*** argv,
                                   int (*callback)(const std::uint8_t* data, std::size_t size));

namespace oxytorch::fuzz {
namespace {

void attempt(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::Internal) return;
    std::fprintf(stderr, "an internal error: %s\n", error.what());
    std::abort();
  }
}

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// So that a sanitizer sees every byte that a result promises.
void touch(std::span<const std::byte> bytes) {
  volatile unsigned sum = 0;
  for (const auto byte : bytes) sum = sum + static_cast<unsigned>(byte);
}

void read_all(const data::Dataset& dataset) {
  constexpr std::int64_t kMost = 64;
  (void)dataset.fingerprint();
  for (std::int64_t i = 0; i < std::min(dataset.size(), kMost); ++i) {
    attempt([&] {
      dataset.will_read(i);
      (void)dataset.place(i);
      const auto sample = dataset.read(i);
      for (const auto& value : sample) touch(value.data.bytes);
    });
  }
}

void fuzz_dataset(std::string_view input) {
  static const std::string folder =
      std::filesystem::temp_directory_path() / ("oxytorch-fuzz-" + std::to_string(getpid()));
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  unpack_files(input, folder);
  const auto look = [](const std::string& location) {
    attempt([&] {
      const auto dataset = data::open(location);
      read_all(*dataset);
      attempt([&] { read_all(*data::token_windows(dataset, 3)); });
    });
  };
  look(folder);
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  for (const auto& file : files) look(file);
}

void fuzz_image(std::string_view input) {
  const auto bytes = std::as_bytes(std::span(input));
  (void)data::image_header(bytes);
  const auto stripped = data::strip_jpeg(bytes);
  for (const int channels : {1, 3}) {
    attempt([&] {
      const auto pixels = data::decode_image(bytes, channels);
      touch(std::as_bytes(std::span(pixels.data.get(), pixels.bytes())));
      if (stripped.empty()) return;
      const auto again = data::decode_stripped(std::as_bytes(std::span(stripped)), channels);
      expect(again.bytes() == pixels.bytes() &&
                 std::equal(again.data.get(), again.data.get() + again.bytes(), pixels.data.get()),
             "the pixels of the stripped image are others");
    });
    attempt([&] { (void)data::decode_image(bytes, channels, data::Box{1, 2, 3, 4}); });
  }
}

void fuzz_stripped(std::string_view input) {
  const auto bytes = std::as_bytes(std::span(input));
  (void)data::stripped_header(bytes);
  attempt([&] {
    const auto pixels = data::decode_stripped(bytes);
    touch(std::as_bytes(std::span(pixels.data.get(), pixels.bytes())));
  });
  attempt([&] { (void)data::decode_stripped(bytes, 1, data::Box{1, 2, 3, 4}); });
}

// A cache's entry, with the checksum right, so that what is behind it is reached too.
void fuzz_entry(std::string_view input) {
  (void)data::checked_entry("key", data::own(input).data);
  const auto whole = data::checked_entry("key", data::own(data::entry_head("key", input) + std::string(input)).data);
  expect(whole.has_value(), "an entry with the right checksum is refused");
  for (const std::size_t fields : {0, 1, 2}) {
    const auto found = data::unpack_sample(*whole, fields);
    if (!found) continue;
    for (const auto& value : found->sample) touch(value.data.bytes);
    touch(found->stripped.bytes);
  }
}

// A kept listing of a folder, with the hash right.
void fuzz_listing(std::string_view input) {
  static const std::string folder =
      std::filesystem::temp_directory_path() / ("oxytorch-fuzz-" + std::to_string(getpid()));
  static const std::string root = folder + "/images", kept = folder + "/kept";
  std::filesystem::create_directories(root + "/a");
  std::filesystem::create_directories(kept);
  std::ofstream(root + "/a/x.jpg");
  {
    const std::uint64_t hash = XXH3_64bits(input.data(), input.size());
    std::ofstream file(kept + "/" + data::fingerprint_of({root}) + ".list", std::ios::binary);
    file << "OXYLIST1";
    file.write(reinterpret_cast<const char*>(&hash), sizeof(hash)) << input;
  }
  const auto listing = data::ImageListing::of(root, {kept, 1e9, 0});
  for (std::size_t i = 0; i < listing.size(); ++i) {
    touch(std::as_bytes(std::span(listing.path(i))));
    if (!listing.classes().empty()) expect(listing.class_of(i) < listing.classes().size(), "a class that there is not");
  }
}

void fuzz_state(std::string_view input) {
  attempt([&] {
    const auto state = data::read_loader_state(std::string(input));
    const auto text = data::write_loader_state(state);
    expect(data::write_loader_state(data::read_loader_state(text)) == text,
           "a state that was written is read otherwise");
  });
}

void fuzz_config(std::string_view input) {
  for (const auto read : {PerformanceConfig::from_json, PerformanceConfig::from_yaml}) {
    attempt([&] {
      const auto config = read(input, "fuzz");
      const auto text = config.to_json();
      expect(PerformanceConfig::from_json(text).to_json() == text,
             "a configuration that was written is read otherwise");
      expect(PerformanceConfig::from_yaml(config.to_yaml()).to_json() == text, "its YAML is read otherwise");
    });
  }
}

void fuzz_certificate(std::string_view input) {
  attempt([&] {
    const auto certificate = tune::Certificate::from_json(input);
    const auto text = certificate.to_json();
    expect(tune::Certificate::from_json(text).to_json() == text, "a certificate that was written is read otherwise");
    (void)certificate.to_text();
    (void)certificate.to_html();
  });
}

void fuzz_words(std::string_view input) {
  const std::string text(input);
  attempt([&] { (void)data::expand_braces(text); });
  attempt([&] { (void)Size::parse(text); });
  attempt([&] { (void)parse_rate(text); });
  attempt([&] { (void)parse_duration(text); });
  attempt([&] { (void)backend::parse_sim_options(text); });
}

struct Target {
  const char* name;
  void (*run)(std::string_view input);
};
constexpr std::array kTargets = {
    Target{"dataset", fuzz_dataset},   Target{"image", fuzz_image},
    Target{"stripped", fuzz_stripped}, Target{"entry", fuzz_entry},
    Target{"listing", fuzz_listing},   Target{"state", fuzz_state},
    Target{"config", fuzz_config},     Target{"certificate", fuzz_certificate},
    Target{"words", fuzz_words},
};

void write_seeds(const std::string& folder) {
  const auto write = [&](const std::string& target, const std::string& content) {
    static int number = 0;
    std::filesystem::create_directories(folder + "/" + target);
    std::ofstream(folder + "/" + target + "/" + std::to_string(number++), std::ios::binary) << content;
  };
  using image_cases::JpegCase;
  const JpegCase small{.width = 19, .height = 17};
  for (auto image : {small, JpegCase{.width = 9, .height = 9, .components = 1}}) {
    write("image", image_cases::make_jpeg(image));
    write("stripped", data::strip_jpeg(image_cases::bytes_of(image_cases::make_jpeg(image))));
    image.restart = 1;
    write("image", image_cases::make_jpeg(image));
    image.progressive = true;
    write("image", image_cases::make_jpeg(image));
  }
  write("image", image_cases::make_webp(8, 9, true, 20, 1));
  write("image", image_cases::make_webp(8, 9, false, 20, 1));
  write("image", image_cases::make_png(8, 9, SPNG_COLOR_TYPE_TRUECOLOR_ALPHA, 8, false,
                                       std::vector<std::uint8_t>(8 * 9 * 4, 77)));
  write("image", image_cases::make_png(8, 9, SPNG_COLOR_TYPE_INDEXED, 2, true, std::vector<std::uint8_t>(2 * 9, 0x1B)));
  const auto view = data::own("0123456789abcdef").data;
  const data::Sample sample = {{.dtype = data::DType::U8, .shape = {4, 4}, .data = view},
                               {.dtype = data::DType::I64, .shape = {2}, .data = view}};
  write("entry", data::pack_sample(sample, -1, ""));
  write("entry", data::pack_sample(sample, 0, "stripped"));
  // Head (images, classes, folders, bytes of paths and of other text, fingerprint), ends, stamps, names.
  const std::vector<std::uint64_t> numbers = {1, 1, 1, 7, 2, 0, 0, 7, 1, 1, 5, 6, 7, 0};
  write("listing", std::string(reinterpret_cast<const char*>(numbers.data()), 8 * numbers.size()) + "a/x.jpga/");
  write("state",
        data::write_loader_state({.seed = 1, .epoch = 2, .samples = 3, .batch = 4, .dataset = "a", .order = "b"}));
  for (const auto* level : {"basic", "ultra"}) {
    write("config", PerformanceConfig(level).to_json());
    write("config", PerformanceConfig(level).to_yaml());
  }
  tune::Certificate certificate;
  certificate.level = "advanced";
  certificate.entries.emplace_back();
  write("certificate", certificate.to_json());
  for (const auto* word : {"a-{000..012}.tar", "1.5GB", "80%", "200MB/s", "1h30m", "devices=2,memory=1GB"})
    write("words", word);
}

}  // namespace
}  // namespace oxytorch::fuzz

int main(int argc, char** argv) {
  using namespace oxytorch::fuzz;
  static const Target* chosen = nullptr;
  const std::string_view word = argc > 1 ? argv[1] : "";
  if (word == "targets") {
    for (const auto& target : kTargets) std::puts(target.name);
    return 0;
  }
  if (word == "seeds" && argc == 3) {
    write_seeds(argv[2]);
    return 0;
  }
  for (const auto& target : kTargets) {
    if (target.name == word) chosen = &target;
  }
  if (chosen == nullptr) {
    std::fprintf(stderr, "usage: %s targets | seeds FOLDER | TARGET [libFuzzer's options]\n", argv[0]);
    return 2;
  }
  argv[1] = argv[0];
  --argc;
  ++argv;
  return LLVMFuzzerRunDriver(&argc, &argv, [](const std::uint8_t* data, std::size_t size) {
    chosen->run({reinterpret_cast<const char*>(data), size});
    return 0;
  });
}
