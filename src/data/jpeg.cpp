#include <cstdio>
// jpeglib.h needs the one before.
#include <jerror.h>
#include <jpeglib.h>
extern "C" {
#include <jpegint.h>
}
#undef MAX
#undef MIN

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <string>

#include "data/codecs.h"
#include "data/coefficients.h"
#include "data/item.h"
#include "oxytorch/error.h"

namespace oxytorch::data {
namespace {

/// The least that a block takes is two bits, for 64 pixels of at most 16 blocks of the largest component; arithmetic
/// coding and stripped images are not far from it.
constexpr std::int64_t kJpegPixelsPerByte = 4096;
/// More scans than any encoder writes are an attempt to keep the decoder busy.
constexpr int kMaxScans = 500;
/// libjpeg gives the rows of one row group at a time, which has at most four.
constexpr JDIMENSION kRowsAtOnce = 4;

/// Whether a warning says that pixels are not those that were encoded.
bool spoils_pixels(int code) {
  switch (code) {
    case JWRN_ADOBE_XFORM:
    case JWRN_BOGUS_ICC:
    case JWRN_EXTRANEOUS_DATA:
    case JWRN_JFIF_MAJOR:
    case JWRN_NOT_SEQUENTIAL: return false;
    default: return true;
  }
}

/// A decompressor. It is made for each image: libjpeg keeps the tables of the image before, which must not serve one
/// that lacks its own.
///
/// libjpeg reports errors by a longjmp to run(), which may not leave out destructors: what a step of run() calls
/// libjpeg from must have none.
class JpegSession {
 public:
  explicit JpegSession(std::span<const std::byte> jpeg)
      : begin_(reinterpret_cast<const JOCTET*>(jpeg.data())), size_(jpeg.size()) {
    info.err = jpeg_std_error(&errors_);
    errors_.error_exit = [](j_common_ptr info) {
      auto& session = *static_cast<JpegSession*>(info->client_data);
      info->err->format_message(info, session.message_);
      std::longjmp(session.jump_, 1);
    };
    errors_.emit_message = [](j_common_ptr info, int level) {
      if (level < 0 && spoils_pixels(info->err->msg_code)) info->err->error_exit(info);
    };
    errors_.output_message = [](j_common_ptr) {};
    progress_.progress_monitor = [](j_common_ptr info) {
      if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kMaxScans) {
        static_cast<JpegSession*>(info->client_data)->stop("it has more than 500 scans");
      }
    };
    info.client_data = this;
  }
  JpegSession(const JpegSession&) = delete;
  JpegSession& operator=(const JpegSession&) = delete;
  ~JpegSession() { jpeg_destroy_decompress(&info); }

  /// Runs a step; false where libjpeg ended it by an error.
  template <class Step>
  [[nodiscard]] [[gnu::noinline]] bool run(const Step& step) {
    if (setjmp(jump_) != 0) return false;
    step();
    return true;
  }

  /// Ends a step from inside of it.
  [[noreturn]] void stop(const char* reason) {
    std::snprintf(message_, sizeof(message_), "%s", reason);
    std::longjmp(jump_, 1);
  }

  /// Throws what libjpeg said.
  [[noreturn]] void fail() const {
    OXY_CHECK(errors_.msg_code != JERR_OUT_OF_MEMORY, OutOfMemory, "there is no memory left to decode a JPEG image of ",
              size_, " bytes.");
    const JOCTET* at = info.src == nullptr ? begin_ : info.src->next_input_byte;
    // At the end of the data libjpeg reads an end marker of its own.
    const bool inside = !std::less<>{}(at, begin_) && std::less<>{}(at, begin_ + size_);
    const std::size_t offset = inside ? static_cast<std::size_t>(at - begin_) : size_;
    detail::raise(ErrorCode::Io, "the JPEG image of ", size_, " bytes cannot be decoded, at byte ", offset, ": ",
                  message_, ".");
  }

  void read_header() {
    jpeg_create_decompress(&info);
    info.progress = &progress_;
    jpeg_mem_src(&info, begin_, size_);
    jpeg_read_header(&info, TRUE);
  }

  jpeg_decompress_struct info{};
  CoefficientReader* coefficients = nullptr;

 private:
  const JOCTET* begin_;
  std::size_t size_;
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  std::jmp_buf jump_{};
  char message_[JMSG_LENGTH_MAX]{};
};

/// Which columns and rows libjpeg is asked for.
struct JpegWindow {
  JDIMENSION left = 0, width = 0, skipped_rows = 0;
  bool skips = true;
};

/// Pixels of one MCU's width, as jpeg_crop_scanline() has it.
JDIMENSION mcu_width(const jpeg_decompress_struct& info) {
  const bool alone = info.comps_in_scan == 1 && info.num_components == 1;
  return static_cast<JDIMENSION>(DCTSIZE * (alone ? 1 : info.max_h_samp_factor));
}

/// Whether a progressive image lacks scans, so that libjpeg smooths over the borders of blocks.
bool is_incomplete(const jpeg_decompress_struct& info) {
  if (!info.progressive_mode || info.coef_bits == nullptr) return false;
  for (int component = 0; component < info.num_components; ++component) {
    const int* bits = info.coef_bits[component];
    if (std::any_of(bits, bits + DCTSIZE2, [](int accuracy) { return accuracy != 0; })) return true;
  }
  return false;
}

/// The least window that gives the pixels of `box` as the whole image has them: chroma is interpolated between
/// neighbours, so one column more on each side, and libjpeg begins at a border of MCUs.
JpegWindow plan_window(const jpeg_decompress_struct& info, const Box& box) {
  const JDIMENSION image_width = info.output_width;
  if (is_incomplete(info)) return {0, image_width, static_cast<JDIMENSION>(box.y), false};
  const JDIMENSION align = mcu_width(info);
  const auto x = static_cast<JDIMENSION>(box.x), end = x + static_cast<JDIMENSION>(box.width);
  JDIMENSION left = x == 0 ? 0 : (x - 1) / align * align;
  const JDIMENSION right = std::min(image_width, (end / align + 1) * align);
  // libjpeg interpolates in another way where a window has less than three columns of chroma.
  if (right - left < align && left > 0) left -= align;
  return {left, right - left, static_cast<JDIMENSION>(box.y), true};
}

/// CMYK as Adobe writes it, inverted, to RGB.
void cmyk_to_rgb(const JSAMPLE* cmyk, std::size_t count, std::uint8_t* rgb) {
  for (std::size_t i = 0; i < count; ++i, cmyk += 4, rgb += 3) {
    for (int c = 0; c < 3; ++c) {
      const unsigned product = (255U - cmyk[c]) * cmyk[3] + 128;
      rgb[c] = static_cast<std::uint8_t>(cmyk[3] - (((product >> 8) + product) >> 8));
    }
  }
}

bool is_cmyk(const jpeg_decompress_struct& info) {
  return info.jpeg_color_space == JCS_CMYK || info.jpeg_color_space == JCS_YCCK;
}

/// Copies a row of what libjpeg gave, from its `skip`th pixel, into the image.
void write_row(const jpeg_decompress_struct& info, JSAMPLE* row, std::size_t skip, const Pixels& pixels, int y) {
  const auto width = static_cast<std::size_t>(pixels.width), channels = static_cast<std::size_t>(pixels.channels);
  std::uint8_t* out = pixels.data.get() + static_cast<std::size_t>(y) * width * channels;
  if (is_cmyk(info)) {
    cmyk_to_rgb(row + 4 * skip, width, row);
    write_rgb(row, width, pixels.channels, out);
  } else {
    std::memcpy(out, row + channels * skip, width * channels);
  }
}

void read_rows(jpeg_decompress_struct& info, const JpegWindow& window, const Box& box, const Pixels& pixels,
               std::uint8_t* buffer) {
  JDIMENSION left = window.left, width = window.width;
  const auto row_bytes = static_cast<std::size_t>(width) * static_cast<std::size_t>(info.output_components);
  const bool direct = static_cast<int>(width) == box.width && !is_cmyk(info);
  if (width != info.output_width) jpeg_crop_scanline(&info, &left, &width);
  if (window.skips) jpeg_skip_scanlines(&info, window.skipped_rows);
  const auto first = static_cast<JDIMENSION>(box.y), end = first + static_cast<JDIMENSION>(box.height);
  while (info.output_scanline < end) {
    const JDIMENSION y = info.output_scanline;
    JSAMPROW rows[kRowsAtOnce];
    const bool into_image = direct && y >= first;
    for (JDIMENSION i = 0; i < kRowsAtOnce; ++i) {
      rows[i] = into_image ? pixels.data.get() + (y - first + i) * row_bytes : buffer + i * row_bytes;
    }
    const JDIMENSION count = jpeg_read_scanlines(&info, rows, std::min(kRowsAtOnce, end - y));
    for (JDIMENSION i = 0; i < count && !into_image; ++i) {
      if (y + i < first) continue;
      write_row(info, rows[i], static_cast<std::size_t>(box.x) - left, pixels, static_cast<int>(y + i - first));
    }
  }
}

/// Whether the coefficients of an image can be kept: what follows is set up for one pass over one interleaved scan.
bool is_simple_baseline(j_decompress_ptr info) {
  const J_COLOR_SPACE space = info->jpeg_color_space;
  return !info->progressive_mode && !info->arith_code && info->data_precision == 8 &&
         (info->num_components == 1 || info->num_components == 3) && info->comps_in_scan == info->num_components &&
         jpeg_has_multiple_scans(info) == 0 && (space == JCS_GRAYSCALE || space == JCS_YCbCr || space == JCS_RGB);
}

McuLayout layout_of(const jpeg_decompress_struct& info) {
  return {info.MCUs_per_row, info.MCU_rows_in_scan, static_cast<std::uint32_t>(info.blocks_in_MCU)};
}

/// Which blocks of an MCU are of components that the output needs.
std::uint32_t needed_blocks(const jpeg_decompress_struct& info) {
  std::uint32_t needed = 0;
  for (int i = 0; i < info.blocks_in_MCU; ++i) {
    if (info.cur_comp_info[info.MCU_membership[i]]->component_needed) needed |= 1U << i;
  }
  return needed;
}

/// The JPEG's sizes and quantisation tables as libjpeg has understood them, without Huffman tables, which libjpeg
/// replaces by the standard ones.
std::string minimal_header(const jpeg_decompress_struct& info) {
  std::string bytes;
  const auto put = [&](std::initializer_list<unsigned> values) {
    for (const unsigned value : values) bytes.push_back(static_cast<char>(value));
  };
  const auto components = static_cast<unsigned>(info.num_components);
  // Start of image, and Adobe's marker, which tells RGB from YCbCr.
  put({0xFF, 0xD8, 0xFF, 0xEE, 0, 14, 'A', 'd', 'o', 'b', 'e', 0, 100, 0, 0, 0, 0});
  put({info.jpeg_color_space == JCS_YCbCr ? 1U : 0U});
  unsigned written = 0;
  for (unsigned c = 0; c < components; ++c) {
    const jpeg_component_info& component = info.comp_info[c];
    const auto table = static_cast<unsigned>(component.quant_tbl_no);
    if ((written >> table & 1) != 0) continue;
    written |= 1U << table;
    put({0xFF, 0xDB, 0, 3 + 2 * DCTSIZE2, 0x10 | table});
    for (const std::uint8_t place : kNaturalOrder) {
      const unsigned step = component.quant_table->quantval[place];
      put({step >> 8, step & 0xFF});
    }
  }
  put({0xFF, 0xC0, 0, 8 + 3 * components, 8});
  put({info.image_height >> 8, info.image_height & 0xFF, info.image_width >> 8, info.image_width & 0xFF, components});
  for (unsigned c = 0; c < components; ++c) {
    const jpeg_component_info& component = info.comp_info[c];
    put({c + 1, static_cast<unsigned>(component.h_samp_factor << 4 | component.v_samp_factor),
         static_cast<unsigned>(component.quant_tbl_no)});
  }
  put({0xFF, 0xDA, 0, 6 + 2 * components, components});
  for (unsigned c = 0; c < components; ++c) put({c + 1, 0});
  put({0, DCTSIZE2 - 1, 0});
  return bytes;
}

/// Sets libjpeg up for output, from `coefficients` if there are any.
void start(JpegSession& session, int channels, CoefficientReader* coefficients) {
  jpeg_decompress_struct& info = session.info;
  info.out_color_space = is_cmyk(info) ? JCS_CMYK : channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  if (coefficients == nullptr) {
    jpeg_start_decompress(&info);
    return;
  }
  if (!is_simple_baseline(&info)) session.stop("its header is not that of a stripped JPEG");
  jpeg_start_decompress(&info);
  if (layout_of(info) != coefficients->layout()) session.stop("its header and its coefficients differ");
  session.coefficients = coefficients;
  info.entropy->decode_mcu = [](j_decompress_ptr info, JBLOCKROW* blocks) -> boolean {
    auto& session = *static_cast<JpegSession*>(info->client_data);
    if (blocks == nullptr) {
      session.coefficients->skip_mcu();
      return TRUE;
    }
    static_assert(sizeof(JBLOCKROW) == sizeof(std::int16_t*) && sizeof(JCOEF) == sizeof(std::int16_t));
    std::int16_t* coefficients[D_MAX_BLOCKS_IN_MCU];
    for (int i = 0; i < info->blocks_in_MCU; ++i) coefficients[i] = blocks[i][0];
    if (!session.coefficients->next_mcu(coefficients)) session.stop("its coefficients are damaged");
    return TRUE;
  };
}

}  // namespace

Pixels decode_jpeg(std::span<const std::byte> jpeg, int channels, std::optional<Box> crop,
                   CoefficientReader* coefficients) {
  JpegSession session(jpeg);
  jpeg_decompress_struct& info = session.info;
  if (!session.run([&] { session.read_header(); })) session.fail();
  check_size("JPEG", info.image_width, info.image_height, coefficients == nullptr ? jpeg.size() : coefficients->bytes(),
             kJpegPixelsPerByte);
  const Box box = resolve_crop(crop, static_cast<int>(info.image_width), static_cast<int>(info.image_height));
  if (!session.run([&] { start(session, channels, coefficients); })) session.fail();
  const JpegWindow window = plan_window(info, box);
  if (coefficients != nullptr) {
    const JDIMENSION align = mcu_width(info);
    coefficients->select(window.left / align, (window.left + window.width - 1) / align, needed_blocks(info));
  }
  Pixels pixels = allocate_pixels(box.width, box.height, channels);
  std::uint8_t* buffer =
      row_buffer(std::size_t{kRowsAtOnce} * window.width * static_cast<std::size_t>(info.output_components));
  if (!session.run([&] { read_rows(info, window, box, pixels, buffer); })) session.fail();
  return pixels;
}

bool read_jpeg_coefficients(std::span<const std::byte> jpeg, CoefficientWriter& writer) {
  JpegSession session(jpeg);
  jpeg_decompress_struct& info = session.info;
  if (!session.run([&] { session.read_header(); })) return false;
  if (!is_simple_baseline(&info) ||
      !plausible_size(info.image_width, info.image_height, jpeg.size(), kJpegPixelsPerByte)) {
    return false;
  }
  // What is needed least for the output, of which there is none.
  info.do_fancy_upsampling = FALSE;
  if (!session.run([&] { jpeg_start_decompress(&info); })) return false;
  writer.begin(layout_of(info), minimal_header(info));
  return session.run([&] {
    alignas(64) JBLOCK blocks[D_MAX_BLOCKS_IN_MCU];
    JBLOCKROW pointers[D_MAX_BLOCKS_IN_MCU];
    for (int i = 0; i < D_MAX_BLOCKS_IN_MCU; ++i) pointers[i] = &blocks[i];
    const std::size_t used = sizeof(JBLOCK) * static_cast<std::size_t>(info.blocks_in_MCU);
    const std::size_t count = std::size_t{info.MCUs_per_row} * info.MCU_rows_in_scan;
    for (std::size_t i = 0; i < count; ++i) {
      std::memset(blocks, 0, used);
      if (info.entropy->decode_mcu(&info, pointers) == 0) session.stop("it ends too early");
      writer.add_mcu(blocks[0]);
    }
  });
}

}  // namespace oxytorch::data
