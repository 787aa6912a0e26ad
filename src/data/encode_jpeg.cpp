#include <csetjmp>
#include <cstdio>
#include <cstdlib>

#include <jpeglib.h>

#include "oxytorch/data/convert.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

struct EncodeFailure {
  jpeg_error_mgr manager;
  std::jmp_buf back;
  char message[JMSG_LENGTH_MAX];
};

/// No object with a destructor lives here: libjpeg leaves it by longjmp.
bool compress_jpeg(const Pixels& pixels, int quality, EncodeFailure& failure, unsigned char** to,
                   unsigned long* bytes) {
  jpeg_compress_struct encoder;
  encoder.err = jpeg_std_error(&failure.manager);
  failure.manager.error_exit = [](j_common_ptr common) {
    auto* failed = reinterpret_cast<EncodeFailure*>(common->err);
    common->err->format_message(common, failed->message);
    std::longjmp(failed->back, 1);
  };
  if (setjmp(failure.back) != 0) {
    jpeg_destroy_compress(&encoder);
    return false;
  }
  jpeg_create_compress(&encoder);
  jpeg_mem_dest(&encoder, to, bytes);
  encoder.image_width = static_cast<JDIMENSION>(pixels.width);
  encoder.image_height = static_cast<JDIMENSION>(pixels.height);
  encoder.input_components = pixels.channels;
  encoder.in_color_space = pixels.channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_set_defaults(&encoder);
  jpeg_set_quality(&encoder, quality, TRUE);
  jpeg_start_compress(&encoder, TRUE);
  const auto stride = static_cast<std::size_t>(pixels.width) * static_cast<std::size_t>(pixels.channels);
  while (encoder.next_scanline < encoder.image_height) {
    JSAMPROW row = pixels.data.get() + encoder.next_scanline * stride;
    jpeg_write_scanlines(&encoder, &row, 1);
  }
  jpeg_finish_compress(&encoder);
  jpeg_destroy_compress(&encoder);
  return true;
}

}  // namespace

std::string encode_jpeg(const Pixels& pixels, int quality) {
  OXY_CHECK(quality >= 1 && quality <= 100, InvalidArgument, "the quality of a JPEG is ", quality,
            ", expected 1 to 100.");
  OXY_CHECK(pixels.width > 0 && pixels.height > 0 && (pixels.channels == 1 || pixels.channels == 3), InvalidArgument,
            "an image of ", pixels.width, " x ", pixels.height, " with ", pixels.channels,
            " channels becomes no JPEG.");
  EncodeFailure failure{};
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  const bool done = compress_jpeg(pixels, quality, failure, &bytes, &size);
  std::string encoded;
  if (done) encoded.assign(reinterpret_cast<const char*>(bytes), size);
  std::free(bytes);
  OXY_CHECK(done, InvalidArgument, "an image of ", pixels.width, " x ", pixels.height,
            " becomes no JPEG: ", failure.message, ".");
  return encoded;
}

}  // namespace oxytorch::data
