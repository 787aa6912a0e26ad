// Google Benchmark of JPEG decoding, from files and from stripped ones, whole and cropped: items_per_second are images
// per core-second. Images are 500x375 with 4:2:0 subsampling, as most photos of training sets.
#include <benchmark/benchmark.h>

#include <cstdio>
// jpeglib.h needs the one before.
#include <jpeglib.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "oxytorch/data/image.h"

namespace {

using namespace oxytorch::data;

constexpr int kWidth = 500, kHeight = 375, kImages = 16;

// Noise of seven octaves whose amplitudes fall as those of photos do, plus grain.
std::vector<std::uint8_t> make_rgb(unsigned seed, double grain) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> sum(3UL * kWidth * kHeight, 128.0);
  for (int octave = 0; octave < 7; ++octave) {
    const int step = 128 >> octave, columns = kWidth / step + 2;
    const double amplitude = 40.0 * std::pow(0.62, octave) * (octave > 3 ? grain : 1.0);
    std::vector<double> nodes(static_cast<std::size_t>(3 * columns * (kHeight / step + 2)));
    for (std::size_t i = 0; i < nodes.size(); i += 3) {
      const double light = normal(random);
      for (std::size_t c = 0; c < 3; ++c) nodes[i + c] = amplitude * (light + 0.3 * normal(random));
    }
    double* out = sum.data();
    for (int y = 0; y < kHeight; ++y) {
      for (int x = 0; x < kWidth; ++x) {
        const double fx = static_cast<double>(x % step) / step, fy = static_cast<double>(y % step) / step;
        const double* at = nodes.data() + 3 * (y / step * columns + x / step);
        for (int c = 0; c < 3; ++c) {
          const double top = at[c] * (1 - fx) + at[c + 3] * fx;
          const double bottom = at[c + 3 * columns] * (1 - fx) + at[c + 3 * columns + 3] * fx;
          *out++ += top * (1 - fy) + bottom * fy;
        }
      }
    }
  }
  std::vector<std::uint8_t> rgb(sum.size());
  std::transform(sum.begin(), sum.end(), rgb.begin(),
                 [](double value) { return static_cast<std::uint8_t>(std::clamp(value, 0.0, 255.0)); });
  return rgb;
}

std::string compress(std::vector<std::uint8_t> rgb, int quality) {
  jpeg_compress_struct info;
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &bytes, &size);
  info.image_width = kWidth;
  info.image_height = kHeight;
  info.input_components = 3;
  info.in_color_space = JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, quality, TRUE);
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < kHeight) {
    JSAMPROW row = rgb.data() + 3UL * kWidth * info.next_scanline;
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  std::string jpeg(reinterpret_cast<const char*>(bytes), size);
  std::free(bytes);
  return jpeg;
}

struct ImageSet {
  std::vector<std::string> jpegs, stripped;
  double jpeg_kilobytes = 0, size_factor = 0;
};

// Images of about `kilobytes` at `quality`: the grain is searched for.
const ImageSet& image_set(std::int64_t kilobytes, int quality) {
  static std::vector<std::pair<std::int64_t, ImageSet>> made;
  for (const auto& [size, set] : made) {
    if (size == kilobytes) return set;
  }
  double low = 0, high = 40;
  while (high - low > 0.02) {
    const double grain = (low + high) / 2;
    (compress(make_rgb(0, grain), quality).size() < static_cast<std::size_t>(kilobytes) * 1000 ? low : high) = grain;
  }
  ImageSet set;
  double bytes = 0, stripped_bytes = 0;
  for (unsigned i = 0; i < kImages; ++i) {
    set.jpegs.push_back(compress(make_rgb(i, low), quality));
    set.stripped.push_back(strip_jpeg(std::as_bytes(std::span(set.jpegs.back()))));
    bytes += static_cast<double>(set.jpegs.back().size());
    stripped_bytes += static_cast<double>(set.stripped.back().size());
  }
  set.jpeg_kilobytes = bytes / kImages / 1000;
  set.size_factor = stripped_bytes / bytes;
  made.emplace_back(kilobytes, std::move(set));
  return made.back().second;
}

template <class Work>
void run(benchmark::State& state, const std::vector<std::string>& inputs, const Work& work) {
  std::size_t next = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(work(std::as_bytes(std::span(inputs[next]))));
    next = (next + 1) % inputs.size();
  }
  state.SetItemsProcessed(state.iterations());
  const ImageSet& set = image_set(state.range(0), static_cast<int>(state.range(1)));
  state.counters["KB"] = set.jpeg_kilobytes;
  state.counters["stripped_size"] = set.size_factor;
}

const ImageSet& set_of(const benchmark::State& state) {
  return image_set(state.range(0), static_cast<int>(state.range(1)));
}

const std::optional<Box> kNoCrop, kCrop = Box{130, 60, 224, 224};

void decode_whole(benchmark::State& state) {
  run(state, set_of(state).jpegs, [](auto jpeg) { return decode_image(jpeg); });
}
void decode_crop(benchmark::State& state) {
  run(state, set_of(state).jpegs, [](auto jpeg) { return decode_image(jpeg, 3, kCrop); });
}
void stripped_whole(benchmark::State& state) {
  run(state, set_of(state).stripped, [](auto stripped) { return decode_stripped(stripped); });
}
void stripped_crop(benchmark::State& state) {
  run(state, set_of(state).stripped, [](auto stripped) { return decode_stripped(stripped, 3, kCrop); });
}
void strip(benchmark::State& state) {
  run(state, set_of(state).jpegs, [](auto jpeg) { return strip_jpeg(jpeg); });
}

void sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"KB", "quality"})->Args({35, 75})->Args({50, 90})->Args({100, 90});
}
BENCHMARK(decode_whole)->Apply(sizes);
BENCHMARK(stripped_whole)->Apply(sizes);
BENCHMARK(decode_crop)->Apply(sizes);
BENCHMARK(stripped_crop)->Apply(sizes);
BENCHMARK(strip)->Apply(sizes);

}  // namespace
