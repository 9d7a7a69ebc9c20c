# As much of Zephyr's build as a module names: what a library has goes to the standard error, a word a line.
#   cmake [-DCONFIG_...=y] -DMODULE=FOLDER -P zephyr.cmake
function(zephyr_library)
  message("library ${ARGN}")
endfunction()

function(zephyr_library_sources)
  foreach(file ${ARGN})
    if(NOT EXISTS "${MODULE}/${file}")
      message(FATAL_ERROR "${file} is not there")
    endif()
    message("source ${file}")
  endforeach()
endfunction()

function(zephyr_include_directories)
  foreach(folder ${ARGN})
    if(NOT IS_DIRECTORY "${MODULE}/${folder}")
      message(FATAL_ERROR "${folder} is no folder")
    endif()
    message("include ${folder}")
  endforeach()
endfunction()

include("${MODULE}/CMakeLists.txt")
